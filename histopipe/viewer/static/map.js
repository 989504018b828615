// The map: a sample of the patches of all slides by the similarity of their features. A lasso selects patches.

import {classColour, heat} from './layers.js';
import {get} from './pane.js';
import {colourBox, make, say, thumb} from './panel.js';
import {inPolygon} from './selection.js';

const WAIT_MS = 700, SHOWN = 48;
const NEAR = 8, STEP = 4, SMALLEST = 1.2, LARGEST = 3;  // in pixels of the canvas
const MOST_CLASSES = 30;
const MOVES = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
const number = value => value.toLocaleString('en'), counted = (value, word) => `${number(value)} ${word}${value === 1 ? '' : word === 'patch' ? 'es' : 's'}`;

/** The panel "Map". `slides` are those of the list, `paneOf` returns the active pane, `chosen` gets the selected patches. */
export class PatchMap {
  constructor(panel, slides, paneOf, jump, chosen) {
    Object.assign(this, {panel, slides, paneOf, jump, chosen});
    this.points = null;
    this.selected = new Set();
    this.lasso = [];
    this.at = [0.5, 0.5];  // of the circle that keys move, as a share of the canvas
    this.radius = 0.05;
  }

  /** Show the panel; the first time, load the map. */
  open() {
    if (!this.canvas) this.build();
    this.showColours();
    if (!this.points) this.load();
    this.draw();
  }

  build() {
    const option = ([value, text]) => make('option', {value}, text);
    this.method = make('select', {'aria-label': 'Kind of map'}, ...[['pca', 'PCA'], ['umap', 'UMAP']].map(option));
    this.colours = make('select', {'aria-label': 'Colour by'});
    this.canvas = make('canvas', {
      id: 'map-canvas', tabIndex: 0, role: 'application',
      'aria-label': 'Map of patches. Arrow keys move the circle, plus and minus change it, Space selects what is in it, Escape selects nothing.',
    });
    const wide = make('button', {'aria-pressed': false, onclick: () => {
      wide.setAttribute('aria-pressed', this.panel.parentElement.classList.toggle('wide'));
    }}, 'Large');
    this.text = make('p', {id: 'map-state', className: 'soft', role: 'status'});
    this.legend = make('ul', {className: 'legend'});
    this.sheet = make('div', {className: 'gallery', role: 'group', 'aria-label': 'Selected patches'});
    this.panel.append(
      make('div', {className: 'tools'}, make('label', {}, 'Map ', this.method), make('label', {}, 'Colour ', this.colours), wide),
      this.canvas, this.text, this.legend, this.sheet);
    this.method.addEventListener('change', () => this.load());
    this.colours.addEventListener('change', () => this.colour());
    const at = event => {
      const box = this.canvas.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    };
    this.canvas.addEventListener('pointerdown', event => { this.lasso = [at(event)]; this.byKeys = false; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener('pointermove', event => {
      if (!this.lasso.length) return;
      const [x, y] = at(event), last = this.lasso[this.lasso.length - 1];
      if (Math.hypot(x - last[0], y - last[1]) * this.side > STEP) { this.lasso.push([x, y]); this.draw(); }
    });
    this.canvas.addEventListener('pointerup', event => this.release(event));
    this.canvas.addEventListener('pointercancel', () => { this.lasso = []; this.draw(); });
    this.canvas.addEventListener('keydown', event => this.key(event));
    this.canvas.addEventListener('focus', () => { this.byKeys = this.canvas.matches(':focus-visible'); this.draw(); });
    this.canvas.addEventListener('blur', () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** Ask for the map until it is made. */
  async load() {
    const loading = this.loading = Symbol('map'), method = this.method.value;
    while (loading === this.loading) {
      let answer;
      try { answer = await get(`map/${method}`, 'response'); } catch (error) { this.text.textContent = error.message; return; }
      if (loading !== this.loading) return;
      if (answer.status === 200) { this.read(new Float32Array(await answer.arrayBuffer())); return; }
      this.text.textContent = `Reading features: ${number((await answer.json()).patches)} patches…`;
      await new Promise(resolve => { setTimeout(resolve, WAIT_MS); });
    }
  }

  read(values) {
    const count = values.length / 5, part = i => values.subarray(i * count, (i + 1) * count);
    const [slide, x, y, u, v] = [0, 1, 2, 3, 4].map(part);
    // Ends that a few distant patches do not stretch.
    const [left, right] = ends(u), [top, bottom] = ends(v);
    const inside = (value, low, high) => 0.03 + 0.94 * Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
    this.points = {count, slide, x, y, u: u.map(it => inside(it, left, right)), v: v.map(it => inside(it, top, bottom))};
    this.select([]);
    this.colour();
  }

  /** List what the patches can be coloured by: facts of the slides, and the layers of the slide that is open. */
  showColours() {
    const kept = this.colours.value || 'slide:label';
    const facts = ['name', 'patient', 'label', 'site'].map(name => [`slide:${name}`, name === 'name' ? 'slide' : `${name} of the slide`]);
    const layers = (this.paneOf()?.layers || []).filter(it => it.grid >= 0 && it.key !== 'learned-p').map(it => [`layer:${it.key}`, it.title]);
    this.colours.replaceChildren(...[...facts, ...layers].map(([value, text]) => make('option', {value}, text)));
    this.colours.value = [...facts, ...layers].some(([value]) => value === kept) ? kept : 'slide:label';
  }

  /** Colour the patches again after labels have changed. */
  refresh() {
    if (!this.panel.hidden && /^layer:(mine|learned)$/.test(this.colours.value)) this.colour();
  }

  async colour() {
    if (!this.points) return;
    const {value} = this.colours, colouring = this.colouring = Symbol('colours'), {points} = this;
    const key = value.slice(value.indexOf(':') + 1);
    let values, classes, low = 0, high = 1;
    if (value.startsWith('slide:')) {
      const texts = Array.from(points.slide, it => this.slides[it][key] || '');
      classes = [...new Set(texts.filter(Boolean))].sort();
      const numbers = new Map(classes.map((name, i) => [name, i]));
      values = Float32Array.from(texts, it => numbers.get(it) ?? NaN);
    } else {
      this.text.textContent = 'Reading…';
      const layer = this.paneOf().layers.find(it => it.key === key);
      ({classes, low, high} = layer);
      try { values = new Float32Array(await get(`map?layer=${encodeURIComponent(key)}`, 'arrayBuffer')); } catch (error) { say(error.message); return; }
      if (colouring !== this.colouring) return;
    }
    const palette = classes.map(classColour), scale = it => heat((it - low) / (high - low || 1));
    points.colour = Array.from(values, it => it !== it ? null : classes.length ? palette[it] : `rgb(${scale(it)})`);
    this.showLegend(values, classes, low, high);
    this.showText();
    this.draw();
  }

  showLegend(values, classes, low, high) {
    const counts = new Map(), missing = values.reduce((sum, it) => sum + (it !== it), 0);
    for (const value of values) if (value === value) counts.set(value, (counts.get(value) || 0) + 1);
    const entry = (colour, text) => make('li', {}, colourBox(colour), text);
    const names = classes.length ? [...counts].sort((a, b) => b[1] - a[1]) : [];
    this.legend.replaceChildren(
      ...names.slice(0, MOST_CLASSES).map(([i, count]) => entry(classColour(classes[i], i), `${classes[i]} (${number(count)})`)),
      ...(names.length > MOST_CLASSES ? [make('li', {}, `and ${number(names.length - MOST_CLASSES)} more`)] : []),
      ...(classes.length ? [] : [make('li', {}, make('div', {className: 'colourbar'}), make('div', {className: 'ends'}, make('span', {}, low.toPrecision(3)), make('span', {}, high.toPrecision(3))))]),
      ...(missing ? [entry('#8888', `none (${number(missing)})`)] : []));
  }

  get side() { return this.canvas.clientWidth || 1; }

  draw() {
    if (!this.canvas || this.panel.hidden) return;
    const {side, points, canvas} = this, ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(side * ratio)) canvas.width = canvas.height = Math.round(side * ratio);
    const context = canvas.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, side, side);
    if (!points) return;
    const dot = (i, colour, radius) => {
      context.fillStyle = colour;
      context.fillRect(points.u[i] * side - radius, points.v[i] * side - radius, 2 * radius, 2 * radius);
    };
    const radius = Math.max(SMALLEST, Math.min(LARGEST, side / Math.sqrt(points.count) / 8));
    context.globalAlpha = this.selected.size ? 0.35 : 1;
    for (let i = 0; i < points.count; i++) if (!points.colour?.[i]) dot(i, '#8886', radius);
    for (let i = 0; i < points.count; i++) if (points.colour?.[i]) dot(i, points.colour[i], radius);
    context.globalAlpha = 1;
    for (const i of this.selected) dot(i, points.colour?.[i] || '#888', radius + 1);
    for (const [colour, width] of [['#000', 4], ['#ffd400', 2]]) {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.beginPath();
      this.lasso.forEach(([x, y], i) => i ? context.lineTo(x * side, y * side) : context.moveTo(x * side, y * side));
      if (document.activeElement === canvas && this.byKeys) context.arc(this.at[0] * side, this.at[1] * side, this.radius * side, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  release(event) {
    const {lasso, points, side} = this;
    this.lasso = [];
    if (!points || !lasso.length) return;
    let rows;
    if (lasso.length > 2) {
      const inside = inPolygon(lasso.map(([x, y]) => ({x, y})));
      rows = [...points.u.keys()].filter(i => inside(points.u[i], points.v[i]));
    } else {
      const away = i => Math.hypot(points.u[i] - lasso[0][0], points.v[i] - lasso[0][1]) * side;
      const nearest = [...points.u.keys()].reduce((a, b) => away(b) < away(a) ? b : a, 0);
      rows = away(nearest) <= NEAR ? [nearest] : [];
    }
    this.select(event.shiftKey ? [...this.selected, ...rows] : rows);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.points) return;
    this.byKeys = true;
    const move = MOVES[event.key], {points} = this, clamp = it => Math.min(1, Math.max(0, it));
    if (move) this.at = this.at.map((it, i) => clamp(it + move[i] * (event.shiftKey ? 0.005 : 0.03)));
    else if (event.key === '+' || event.key === '-') this.radius = Math.min(0.5, Math.max(0.01, this.radius * (event.key === '+' ? 1.25 : 0.8)));
    else if (event.key === ' ') {
      const inside = i => Math.hypot(points.u[i] - this.at[0], points.v[i] - this.at[1]) <= this.radius;
      this.select([...(event.shiftKey ? this.selected : []), ...[...points.u.keys()].filter(inside)]);
    } else if (event.key === 'Escape') this.select([]);
    else return;
    event.preventDefault();
    this.draw();
  }

  select(rows) {
    this.selected = new Set(rows);
    const {points} = this, step = Math.max(1, this.selected.size / SHOWN);
    const isShown = (_, i) => Math.floor(i / step) !== Math.floor((i - 1) / step);  // evenly spaced ones of many
    const sheet = [...this.selected].filter(isShown).map(
      i => ({number: points.slide[i], slide: this.slides[points.slide[i]].name, x: points.x[i], y: points.y[i], size: 0}));
    this.sheet.replaceChildren(...sheet.map(it => thumb(it, 0, it.slide, this.jump)));
    this.chosen(this.patches, sheet);
    this.showText();
    this.draw();
  }

  /** The selected patches: [[slide number, x, y], ...]. */
  get patches() { return this.points && [...this.selected].map(i => [this.points.slide[i], this.points.x[i], this.points.y[i]]); }

  showText() {
    const slides = new Set([...this.selected].map(i => this.points.slide[i])).size;
    this.text.textContent = this.selected.size
      ? `${counted(this.selected.size, 'patch')} of ${counted(slides, 'slide')} selected${this.selected.size > SHOWN ? `, ${SHOWN} of them below` : ''}.`
      : `${number(this.points.count)} random patches. Draw a lasso, or click one.`;
  }
}

/** Return the range of most values. */
function ends(values) {
  const sorted = Float32Array.from(values).sort(), at = share => sorted[Math.round(share * (sorted.length - 1))] || 0;
  return [at(0.002), at(0.998)];
}
