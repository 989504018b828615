// A picture of a slide with its layers: OpenSeadragon below, a canvas of layers above.

import {latticeOf, maskCanvas, paint, shownPatches} from './layers.js';

const STEP = 1 / 4;  // of the picture, moved by a key
const GRID_PIXELS = 10;  // patches smaller than this have no frames
const LIGHT = '#ffffff', DARK = '#000000';
// OpenSeadragon stretches tiles without overlap by one pixel, which blurs them.
const NO_OVERLAP = 1e-6;

// It warns about tiles of the slide before that arrive late; they are no problem.
OpenSeadragon.console = {...console, warn: () => {}};

export const get = async (path, kind = 'json') => {
  const response = await fetch(path);
  if (!response.ok) {
    let reason = `${response.status} ${response.statusText}`;
    try { reason = (await response.json()).error || reason; } catch { /* not JSON */ }
    throw new Error(reason);
  }
  return kind === 'response' ? response : response[kind]();
};

export class Pane extends EventTarget {
  /** `element` becomes the pane; `name` is its label for screen readers. */
  constructor(element, name) {
    super();
    this.element = element;
    element.className = 'pane';
    element.setAttribute('role', 'region');
    element.setAttribute('aria-label', name);
    element.innerHTML = `
      <h2></h2><div class="notes" role="alert"></div>
      <div class="picture" tabindex="0" role="application" aria-label="${name}: arrow keys select patches, plus and minus zoom"></div>
      <div class="scale" aria-hidden="true"><span></span></div><p class="where"></p>`;
    this.title = element.querySelector('h2');
    this.notes = element.querySelector('.notes');
    this.picture = element.querySelector('.picture');
    this.scaleBar = element.querySelector('.scale');
    this.where = element.querySelector('.where');
    this.viewer = OpenSeadragon({
      element: this.picture, drawer: 'canvas', showNavigationControl: false, showNavigator: true,
      navigatorPosition: 'TOP_RIGHT', navigatorWidth: '120px', navigatorHeight: '120px', navigatorAutoFade: false, animationTime: 0.25, springStiffness: 10, blendTime: 0, visibilityRatio: 0.2,
      minZoomImageRatio: 0.5, maxZoomPixelRatio: 16, gestureSettingsMouse: {clickToZoom: false, dblClickToZoom: false},
      gestureSettingsTouch: {clickToZoom: false, dblClickToZoom: false}, loadTilesWithAjax: true, timeout: 120000, tabIndex: '',
      imageLoaderLimit: 8, maxTilesPerFrame: 4,
    });
    this.canvas = document.createElement('canvas');
    this.canvas.className = 'overlay';
    this.picture.append(this.canvas);
    this.slide = null;
    this.tools = null;  // draws on top, and takes clicks and keys while drawing
    const changed = () => { this.draw(); this.dispatchEvent(new Event('move')); };
    this.viewer.addHandler('update-viewport', changed);
    this.viewer.addHandler('resize', () => requestAnimationFrame(changed));
    this.viewer.addHandler('tile-load-failed', event => {
      if (!event.message?.includes('abort')) this.dispatchEvent(new Event('lost'));
    });
    this.viewer.addHandler('canvas-key', event => { event.preventDefaultAction = true; });
    this.viewer.addHandler('canvas-click', event => {
      if (!event.quick || this.tools?.active) return;
      this.select(this.patchAt(this.toSlide(event.position)));
    });
    this.picture.addEventListener('pointermove', event => {
      const box = this.picture.getBoundingClientRect();
      this.pointer = this.toSlide({x: event.clientX - box.left, y: event.clientY - box.top});
      this.showScale();
    });
    this.picture.addEventListener('keydown', event => this.key(event));
    this.picture.addEventListener('pointerdown', () => this.picture.focus({preventScroll: true}));
    for (const kind of ['pointerdown', 'focusin']) {
      element.addEventListener(kind, () => this.dispatchEvent(new Event('activate')), true);
    }
  }

  /** Show slide number `number` of the list; `view` is a place from `place()`, or null for the whole slide. */
  async open(number, view = null, layers = null) {
    const loading = this.loading = Symbol('loading');
    const facts = await get(`slides/${number}`);
    if (this.loading !== loading) return;
    this.number = number;
    this.slide = facts;
    this.base = `slides/${number}`;
    this.selected = null;
    this.layers = [];
    this.mask = this.outlines = null;
    this.dispatchEvent(new Event('slide'));
    this.title.textContent = facts.name;
    this.notes.replaceChildren(...facts.notes.map(text => {
      const line = document.createElement('p');
      line.textContent = text;
      return line;
    }));
    this.loadPictures();
    for (const grid of facts.grids) grid.loading = null;
    const own = facts.layers.map((it, n) => ({...it, n, opacity: 0, range: [-Infinity, Infinity], loading: null}));
    this.layers = [
      {key: 'grid', title: 'Patch grid', group: 'slide', classes: [], opacity: 0, plain: true},
      {key: 'mask', title: 'Tissue mask', group: 'slide', classes: [], opacity: 0, plain: true},
      {key: 'outlines', title: 'Annotations', group: 'slide', classes: [], opacity: 0, plain: true},
      ...own, ...(this.extraLayers?.() || []),
    ].filter(it => (it.key !== 'grid' || facts.grids.length) && (it.key !== 'mask' || facts.mask)
      && (it.key !== 'outlines' || facts.drawing));
    await this.ready;
    if (this.loading !== loading) return;
    view ? this.go(view) : this.home();
    const loaded = await Promise.allSettled((layers || []).map(({key, opacity, range}) => {
      const layer = this.layers.find(it => it.key === key);
      return layer && this.show(layer, opacity, range);
    }));
    if (this.loading !== loading) return;
    this.dispatchEvent(new Event('open'));
    this.dispatchEvent(new Event('layers'));
    const failed = loaded.find(it => it.status === 'rejected');
    if (failed) throw failed.reason;
  }

  /** Load the pictures: tiles of the slide, or tiles of its patches over the stored thumbnail. */
  loadPictures() {
    const {width, height, bounds, tile, overlap, patches, pixels} = this.slide;
    this.viewer.world.removeAll();
    const add = options => new Promise((resolve, reject) => this.viewer.addTiledImage({
      ...options, success: resolve, error: event => reject(new Error(event.message)),
    }));
    if (pixels) {
      const steps = Math.max(0, Math.ceil(Math.log2(Math.max(width, height) / tile)));
      this.ready = add({
        x: 0, y: 0, width: 1,
        tileSource: {
          width, height, tileSize: tile, tileOverlap: overlap, minLevel: 0, maxLevel: steps,
          getTileUrl: (level, x, y) => `${this.base}/tile/${steps - level}/${x}/${y}`,
        },
      });
      return;
    }
    const ground = {type: 'image', url: `${this.base}/overview`, buildPyramid: false};
    this.ready = add({x: bounds[0] / width, y: bounds[1] / width, width: bounds[2] / width, tileSource: ground});
    if (!patches) return;
    const side = 256, most = Math.ceil(Math.log2(Math.max(patches.columns, patches.rows, 2))) + 3;
    this.ready = this.ready.then(() => add({
      x: patches.x / width, y: patches.y / width, width: patches.columns * patches.size / width,
      tileSource: {
        width: patches.columns * side, height: patches.rows * side, tileSize: side, tileOverlap: NO_OVERLAP,
        minLevel: 0, maxLevel: most,
        tileExists: level => most - level <= 3,
        getTileUrl: (level, x, y) => `${this.base}/patches/${most - level}/${x}/${y}`,
      },
    }));
  }

  /** Screen pixels per level-0 pixel. */
  get scale() {
    return this.viewer.viewport.getContainerSize().x / (this.viewer.viewport.getBounds(true).width * this.slide.width);
  }

  /** Convert a point of the picture, in screen pixels, to level-0 pixels. */
  toSlide(point) {
    if (!this.slide) return {x: 0, y: 0};
    const bounds = this.viewer.viewport.getBounds(true), width = this.slide.width;
    return {x: bounds.x * width + point.x / this.scale, y: bounds.y * width + point.y / this.scale};
  }

  /** Convert a point in level-0 pixels to screen pixels of the picture. */
  toScreen(point) {
    const bounds = this.viewer.viewport.getBounds(true), width = this.slide.width, scale = this.scale;
    return {x: (point.x - bounds.x * width) * scale, y: (point.y - bounds.y * width) * scale};
  }

  /** Return the place that is shown, or will be after the movement: its centre, and level-0 pixels per screen pixel. */
  place(current = false) {
    const bounds = this.viewer.viewport.getBounds(current), width = this.slide.width;
    return {
      x: (bounds.x + bounds.width / 2) * width, y: (bounds.y + bounds.height / 2) * width,
      pixel: bounds.width * width / this.viewer.viewport.getContainerSize().x,
    };
  }

  /** Give OpenSeadragon the size of the picture, which it would notice later. */
  fitted() {
    const size = new OpenSeadragon.Point(this.picture.clientWidth, this.picture.clientHeight);
    if (!this.viewer.viewport.getContainerSize().equals(size)) this.viewer.viewport.resize(size, true);
  }

  /** Move to a place, at once. */
  go({x, y, pixel}) {
    this.fitted();
    const size = this.viewer.viewport.getContainerSize(), width = this.slide.width;
    const shape = [size.x * pixel / width, size.y * pixel / width];
    this.viewer.viewport.fitBounds(
      new OpenSeadragon.Rect(x / width - shape[0] / 2, y / width - shape[1] / 2, ...shape), true);
    this.viewer.forceRedraw();
  }

  home() {
    this.fitted();
    const {bounds, width} = this.slide;
    this.viewer.viewport.fitBounds(new OpenSeadragon.Rect(...bounds.map(it => it / width)), true);
  }

  /** Load the positions of a grid, and find its lattice. */
  grid(number) {
    const grid = this.slide.grids[number];
    grid.loading ||= get(`${this.base}/grid/${number}`, 'arrayBuffer').then(buffer => {
      const both = new Int32Array(buffer);
      grid.x = both.subarray(0, grid.count);
      grid.y = both.subarray(grid.count);
      grid.lattice = latticeOf(grid);
      return grid;
    });
    return grid.loading;
  }

  values(layer) {
    const load = layer.load || (() => get(`${this.base}/layer/${layer.n}`, 'arrayBuffer').then(buffer => new Float32Array(buffer)));
    layer.loading ||= load().then(values => layer.values = values);
    return layer.loading;
  }

  /** Set the opacity of a layer (0 to 1) and the range of its values, and load what it needs. */
  async show(layer, opacity, range = null) {
    layer.opacity = opacity;
    if (range) layer.range = range;
    const slide = this.slide;
    let loaded = null;  // another slide may be open when it comes
    if (layer.key === 'grid') await this.grid(0);
    else if (layer.key === 'mask') loaded = this.mask || await maskCanvas(await get(`${this.base}/mask`, 'blob'));
    else if (layer.key === 'outlines') loaded = this.outlines || await get(`${this.base}/drawing`);
    else await Promise.all([this.grid(layer.grid), this.values(layer)]);
    if (slide !== this.slide) return;
    if (layer.key === 'mask') this.mask = loaded;
    else if (layer.key === 'outlines') this.outlines = loaded;
    this.repaint();
    this.dispatchEvent(new Event('layers'));
  }

  /** Paint the rasters of all visible layers again. Ranges of quality columns hide patches in all layers. */
  repaint() {
    this.slide.grids.forEach((grid, number) => {
      const filters = this.layers.filter(it => it.group === 'quality' && it.grid === number && it.values
        && (it.range[0] !== -Infinity || it.range[1] !== Infinity)).map(it => [it.values, it.range]);
      grid.shown = shownPatches(grid.count, filters);
      grid.filtered = filters.length > 0;
      grid.raster = null;
    });
    for (const layer of this.layers) {
      if (layer.plain || !layer.values || !layer.opacity) continue;
      const grid = this.slide.grids[layer.grid];
      if (grid.lattice) layer.raster = paint(layer, grid, grid.shown, layer.range);
    }
    this.draw();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, canvas = this.canvas;
    const width = this.picture.clientWidth, height = this.picture.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext('2d');
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (!this.slide || !this.viewer.world.getItemCount()) return;
    const scale = this.scale, origin = this.toScreen({x: 0, y: 0});
    context.setTransform(ratio * scale, 0, 0, ratio * scale, ratio * origin.x, ratio * origin.y);
    context.imageSmoothingEnabled = false;
    if (!this.hidden) for (const layer of this.layers) if (layer.opacity) this.drawLayer(context, layer, scale);
    this.drawSelected(context, scale);
    this.tools?.draw(context, scale);
    this.showScale();
  }

  drawLayer(context, layer, scale) {
    context.globalAlpha = layer.opacity;
    const [left, top, width, height] = this.slide.bounds;
    if (layer.key === 'mask' && this.mask) context.drawImage(this.mask, left, top, width, height);
    else if (layer.key === 'grid') this.drawGrid(context, scale);
    else if (layer.key === 'outlines') { if (this.outlines && !this.tools) drawOutlines(context, this.outlines, scale); }
    else if (layer.raster) {
      const {left: x, top: y, step, columns, rows} = this.slide.grids[layer.grid].lattice;
      context.drawImage(layer.raster, x, y, columns * step, rows * step);
    }
    context.globalAlpha = 1;
  }

  /** Draw the frames of the visible patches; if they are small, their area. */
  drawGrid(context, scale) {
    const grid = this.slide.grids[0];
    if (!grid?.lattice) return;
    const from = this.toSlide({x: 0, y: 0});
    const to = this.toSlide({x: this.picture.clientWidth, y: this.picture.clientHeight});
    if (grid.size * scale < GRID_PIXELS) {
      const shown = grid.shown || new Uint8Array(grid.count).fill(1);
      grid.raster ||= paint({classes: ['patch'], values: new Float32Array(grid.count)}, grid, shown);
      const {left, top, step, columns, rows} = grid.lattice;
      context.globalAlpha *= 0.5;
      context.drawImage(grid.raster, left, top, columns * step, rows * step);
      return;
    }
    const path = new Path2D();
    for (let i = 0; i < grid.count; i++) {
      const x = grid.x[i], y = grid.y[i];
      if (x + grid.size < from.x || y + grid.size < from.y || x > to.x || y > to.y) continue;
      if (!grid.shown || grid.shown[i]) path.rect(x, y, grid.size, grid.size);
    }
    strokeTwice(context, path, scale, '#e69f00');
  }

  drawSelected(context, scale) {
    if (!this.selected) return;
    const grid = this.slide.grids[this.selected.grid];
    const path = new Path2D();
    path.rect(grid.x[this.selected.row], grid.y[this.selected.row], grid.size, grid.size);
    strokeTwice(context, path, scale, '#ffd400', 3);
  }

  /** Return the visible grid: that of the top layer, else the first. */
  get activeGrid() {
    const visible = this.layers.filter(it => it.opacity && !it.plain);
    return visible.length ? visible[visible.length - 1].grid : 0;
  }

  /** Return the patch at a point in level-0 pixels, or null. */
  async patchAt(point) {
    if (!this.slide?.grids.length) return null;
    const number = this.activeGrid, grid = await this.grid(number);
    let best = null, nearest = Infinity;
    for (let i = 0; i < grid.count; i++) {
      const u = point.x - grid.x[i], v = point.y - grid.y[i];
      if (u < 0 || v < 0 || u >= grid.size || v >= grid.size) continue;
      const distance = Math.hypot(u - grid.size / 2, v - grid.size / 2);
      if (distance < nearest) { nearest = distance; best = {grid: number, row: i}; }
    }
    return best;
  }

  /** Select the patch that a promise or value names: {grid, row}, or null. */
  async select(patch) {
    const chosen = await patch;
    if (chosen) await this.grid(chosen.grid);
    this.selected = chosen;
    this.draw();
    this.dispatchEvent(new Event('select'));
  }

  /** Select the patch at a corner in level-0 pixels, and move there. */
  async jump(x, y) {
    for (let number = 0; number < this.slide.grids.length; number++) {
      const grid = await this.grid(number);
      const row = grid.x.findIndex((at, i) => at === x && grid.y[i] === y);
      if (row >= 0) {
        await this.select({grid: number, row});
        this.showSelected();
        return;
      }
    }
  }

  showSelected() {
    if (!this.selected) return;
    const grid = this.slide.grids[this.selected.grid], row = this.selected.row;
    const {pixel} = this.place();
    this.go({
      x: grid.x[row] + grid.size / 2, y: grid.y[row] + grid.size / 2, pixel: Math.min(pixel, grid.size / 120),
    });
  }

  /** Select the nearest patch in a direction; without a selection, that nearest to the centre. */
  async step(right, down) {
    const number = this.selected ? this.selected.grid : this.activeGrid;
    if (!this.slide.grids.length) { this.pan(right, down); return; }
    const grid = await this.grid(number);
    const centre = this.place();
    const from = this.selected ? {x: grid.x[this.selected.row], y: grid.y[this.selected.row]}
      : {x: centre.x - grid.size / 2, y: centre.y - grid.size / 2};
    let best = -1, least = Infinity;
    for (let i = 0; i < grid.count; i++) {
      const u = grid.x[i] - from.x, v = grid.y[i] - from.y;
      const ahead = u * right + v * down, aside = Math.abs(u * down) + Math.abs(v * right);
      const distance = this.selected ? ahead + 3 * aside : Math.hypot(u, v);
      if (this.selected && ahead <= aside) continue;
      if (distance < least) { least = distance; best = i; }
    }
    if (best < 0) return;
    await this.select({grid: number, row: best});
    const at = this.toScreen({x: grid.x[best] + grid.size / 2, y: grid.y[best] + grid.size / 2});
    if (at.x < 0 || at.y < 0 || at.x > this.picture.clientWidth || at.y > this.picture.clientHeight) {
      this.go({x: grid.x[best] + grid.size / 2, y: grid.y[best] + grid.size / 2, pixel: centre.pixel});
    }
  }

  pan(right, down) {
    const at = this.place();
    at.x += right * STEP * this.picture.clientWidth * at.pixel;
    at.y += down * STEP * this.picture.clientHeight * at.pixel;
    this.go(at);
  }

  key(event) {
    if (!this.slide || event.ctrlKey || event.metaKey || event.altKey) return;
    if (this.tools?.key(event)) { event.preventDefault(); return; }
    const arrows = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
    const zoom = factor => { const at = this.place(); this.go({...at, pixel: at.pixel / factor}); };
    if (arrows[event.key]) event.shiftKey ? this.pan(...arrows[event.key]) : this.step(...arrows[event.key]);
    else if (event.key === '+' || event.key === '=') zoom(1.5);
    else if (event.key === '-') zoom(1 / 1.5);
    else if (event.key === '0') this.home();
    else if (event.key === '1') this.go({...this.place(), pixel: 1 / (window.devicePixelRatio || 1)});
    else if (event.key === 'Enter') this.showSelected();
    else if (event.key === 'Escape') this.select(null);
    else return;
    event.preventDefault();
  }

  /** Show the scale bar, the magnification, and the position of the pointer. */
  showScale() {
    if (!this.slide || !this.viewer.world.getItemCount()) return;
    const {mpp} = this.slide, pixel = 1 / this.scale;
    const unit = mpp ? mpp * pixel : pixel;  // µm, or level-0 pixels, per screen pixel
    const most = 140 * unit, power = 10 ** Math.floor(Math.log10(most));
    const length = [5, 2, 1].find(it => it * power <= most) * power;
    this.scaleBar.style.width = `${length / unit}px`;
    const text = mpp ? (length >= 1000 ? `${length / 1000} mm` : `${length} µm`) : `${length} px`;
    this.scaleBar.firstElementChild.textContent = text;
    const parts = [mpp ? `${(10 / unit).toPrecision(3)}×, ${unit.toPrecision(3)} µm/px` : `1 : ${pixel.toPrecision(3)}`];
    if (this.pointer) {
      parts.push(`x ${Math.floor(this.pointer.x)}, y ${Math.floor(this.pointer.y)} px`);
      if (mpp) parts.push(`${(this.pointer.x * mpp / 1000).toFixed(3)}, ${(this.pointer.y * mpp / 1000).toFixed(3)} mm`);
    }
    for (const grid of this.slide.grids.filter(it => it.filtered)) {
      parts.push(`${grid.shown.reduce((a, b) => a + b, 0).toLocaleString('en')} of ${grid.count.toLocaleString('en')} patches`);
    }
    const shown = parts.join('   ');
    if (this.where.textContent !== shown) this.where.textContent = shown;
  }
}

/** Stroke a path with a dark rim, so that it is visible on every ground. */
export function strokeTwice(context, path, scale, colour, width = 1.5) {
  context.lineWidth = (width + 2) / scale;
  context.strokeStyle = colour === DARK ? LIGHT : DARK;
  const alpha = context.globalAlpha;
  context.globalAlpha = alpha * 0.5;
  context.stroke(path);
  context.globalAlpha = alpha;
  context.lineWidth = width / scale;
  context.strokeStyle = colour;
  context.stroke(path);
}

/** Return the rings of a GeoJSON feature as a path, moved to level-0 pixels; null if it is no area. */
export function featurePath(feature, [left, top]) {
  const geometry = feature.geometry || {};
  const polygons = geometry.type === 'Polygon' ? [geometry.coordinates]
    : geometry.type === 'MultiPolygon' ? geometry.coordinates : [];
  if (!polygons.length) return null;
  const path = new Path2D();
  for (const polygon of polygons) {
    for (const ring of polygon) {
      ring.forEach(([x, y], i) => i ? path.lineTo(x + left, y + top) : path.moveTo(x + left, y + top));
      path.closePath();
    }
  }
  return path;
}

export const className = feature => feature.properties?.classification?.name || '';

/** Return the colour of each class of some features. */
export function classColours(features) {
  const names = [...new Set(features.map(className))].sort();
  return new Map(names.map((name, i) => [name, i]));
}

function drawOutlines(context, {features, origin}, scale) {
  const numbers = classColours(features);
  for (const feature of features) {
    const path = featurePath(feature, origin);
    if (path) strokeTwice(context, path, scale, outlineColour(feature, numbers), 2);
  }
}

/** Return the colour of an outline: that of its file, else of its class. */
export function outlineColour(feature, numbers) {
  const colour = feature.properties?.classification?.color;
  if (Array.isArray(colour) && colour.length === 3) return `rgb(${colour.map(Number).join(' ')})`;
  const palette = ['#d55e00', '#0072b2', '#009e73', '#cc79a7', '#e69f00', '#56b4e9'];
  return palette[(numbers.get(className(feature)) || 0) % palette.length];
}

/** Return the rings of the polygons of a feature. */
export function ringsOf(feature) {
  const geometry = feature?.geometry || {};
  if (geometry.type === 'Polygon') return geometry.coordinates;
  return geometry.type === 'MultiPolygon' ? geometry.coordinates.flat() : [];
}
