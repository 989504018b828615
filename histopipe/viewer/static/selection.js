// Select patches in a picture: by clicks, a rectangle, a lasso or keys.

import {strokeTwice} from './pane.js';

const STEP = 3;  // screen pixels between points of a lasso
const ARROWS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

/** The selection in one pane. `mode` is "click", "rectangle" or "lasso"; events: "select", "key". */
export class Selection extends EventTarget {
  constructor(pane) {
    super();
    this.pane = pane;
    this.mode = 'click';
    this.rows = new Set();
    this.points = [];
    const on = (name, handler) => pane.viewer.addHandler(name, event => {
      if (pane.tools === this) handler.call(this, event, pane.toSlide(event.position));
    });
    on('canvas-press', this.press);
    on('canvas-drag', this.drag);
    on('canvas-release', this.release);
    on('canvas-click', this.click);
    // Rows of one slide are other patches in the next one.
    pane.addEventListener('slide', () => { this.points = []; this.set([]); });
    pane.addEventListener('select', () => {
      if (pane.tools === this && pane.selected?.grid === 0) this.set([pane.selected.row]);
    });
  }

  /** The pane asks whether this takes clicks. */
  get active() { return true; }

  set(rows) {
    this.rows = new Set(rows);
    this.pane.draw();
    this.dispatchEvent(new Event('select'));
  }

  press(event, point) {
    if (this.mode !== 'click') this.points = [point];
  }

  drag(event, point) {
    if (!this.points.length) return;
    event.preventDefaultAction = true;
    const last = this.pane.toScreen(this.points[this.points.length - 1]);
    if (this.mode === 'rectangle') this.points = [this.points[0], point];
    else if (Math.hypot(last.x - event.position.x, last.y - event.position.y) >= STEP) this.points.push(point);
    this.pane.draw();
  }

  async release(event) {
    const points = this.points;
    this.points = [];
    if (points.length < 2) return;
    const {slide} = this.pane, grid = await this.pane.grid(0), inside = this.mode === 'rectangle' ? inRectangle(points) : inPolygon(points);
    if (slide !== this.pane.slide) return;
    const rows = event.originalEvent?.shiftKey ? [...this.rows] : [];
    for (let i = 0; i < grid.count; i++) {
      if ((!grid.shown || grid.shown[i]) && inside(grid.x[i] + grid.size / 2, grid.y[i] + grid.size / 2)) rows.push(i);
    }
    if (this.pane.selected) this.pane.select(null);  // its frame would look selected
    this.set(rows);
  }

  async click(event, point) {
    if (!event.quick) return;
    event.preventDefaultAction = true;
    const patch = await this.pane.patchAt(point);
    if (patch?.grid !== 0) { this.pane.select(null); this.set([]); return; }
    if (event.originalEvent?.shiftKey) {
      const rows = new Set(this.rows);
      rows.has(patch.row) ? rows.delete(patch.row) : rows.add(patch.row);
      this.set(rows);
    } else await this.pane.select(patch);  // calls `set`
  }

  /** Handle a key of the picture; return whether it was used. */
  key(event) {
    if (event.key === 'Escape') { this.pane.select(null); this.set([]); return true; }
    if (ARROWS[event.key] && !event.shiftKey) { this.pane.step(...ARROWS[event.key]); return true; }
    return !this.dispatchEvent(new CustomEvent('key', {detail: event, cancelable: true}));
  }

  draw(context, scale) {
    const grid = this.pane.slide.grids[0];
    if (!grid?.x) return;
    const path = new Path2D();
    for (const row of this.rows) path.rect(grid.x[row], grid.y[row], grid.size, grid.size);
    strokeTwice(context, path, scale, '#ffd400', 2.5);
    if (this.points.length < 2) return;
    const line = new Path2D(), [a, b] = this.points;
    if (this.mode === 'rectangle') line.rect(a.x, a.y, b.x - a.x, b.y - a.y);
    else this.points.forEach(({x, y}, i) => i ? line.lineTo(x, y) : line.moveTo(x, y));
    strokeTwice(context, line, scale, '#ffd400', 2);
  }
}

function inRectangle([a, b]) {
  const [left, right] = [Math.min(a.x, b.x), Math.max(a.x, b.x)], [top, bottom] = [Math.min(a.y, b.y), Math.max(a.y, b.y)];
  return (x, y) => x >= left && x <= right && y >= top && y <= bottom;
}

export function inPolygon(points) {
  const path = new Path2D(), context = document.createElement('canvas').getContext('2d');
  points.forEach(({x, y}, i) => i ? path.lineTo(x, y) : path.moveTo(x, y));
  path.closePath();
  return (x, y) => context.isPointInPath(path, x, y, 'evenodd');
}
