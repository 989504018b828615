// Draw areas on a slide, and save them as GeoJSON: annotations, or the tissue mask.

import {className, classColours, featurePath, get, outlineColour, ringsOf, strokeTwice} from './pane.js';
import {choices, make, say} from './panel.js';
import {CUT, fillTissue, nameOfPart, TISSUE} from './tissue.js';

const NEAR = 8;  // screen pixels between the pointer and a corner that it takes
const FREEHAND_STEP = 3;
const MOST_UNDONE = 100;
const TITLES = {drawing: 'Annotations', tissue: 'Tissue'};
const STORE = 'The store keeps its patches and its mask. A new store has those of the saved outlines:';

/**
 * The drawing tools of one pane. `mode` is "", "polygon", "rectangle" or "freehand". `kind` is what is drawn, one of the
 * keys of TITLES; `kinds` are those that the viewer allows.
 */
export class Drawing {
  constructor(pane, panel, kinds) {
    this.pane = pane;
    this.panel = panel;
    this.kinds = kinds;
    this.kind = kinds[0];
    this.part = TISSUE;
    this.past = [];
    this.mode = '';
    this.points = [];
    this.cross = null;
    this.chosen = -1;
    this.data = {features: [], version: '', origin: [0, 0], file: ''};
    this.changed = false;
    const on = (name, handler) => pane.viewer.addHandler(name, event => {
      if (pane.tools === this) handler.call(this, event, pane.toSlide(event.position));
    });
    on('canvas-press', this.press);
    on('canvas-drag', this.drag);
    on('canvas-release', this.release);
    on('canvas-click', this.click);
    on('canvas-double-click', event => { if (this.mode === 'polygon') { event.preventDefaultAction = true; this.finish(); } });
  }

  /** Whether outlines, or one that is being drawn, would be lost. */
  get unsaved() { return this.changed || this.points.length > 0; }

  /** Ask whether outlines that are not saved may be lost. */
  mayLeave() {
    return !this.unsaved || window.confirm(`The outlines of this slide are not saved (${TITLES[this.kind]}). Leave them?`);
  }

  get isMask() { return this.kind === 'tissue'; }

  /** Whether the outlines are those of the slide that is open. */
  get isLoaded() { return this.loaded === this.url; }

  get url() { return `${this.pane.base}/${this.kind}`; }

  /** Draw annotations, or the mask. */
  async choose(kind) {
    if (kind !== this.kind && this.mayLeave()) {
      this.kind = kind;
      try {
        await this.load();
        this.pane.tools = this;
      } catch (error) { this.fail(error.message); }
    }
    this.show();
  }

  /** Forget the outlines. */
  clear() {
    this.past = [];
    this.loaded = '';
    this.data = {features: [], version: '', origin: [0, 0], file: ''};
    this.base = [];
    this.changed = false;
    this.failed = this.conflict = '';
    this.chosen = -1;
    this.stop();
  }

  /** Show that the file cannot be read. */
  fail(reason) {
    this.clear();
    this.failed = reason;
    this.show();
  }

  /** Whether the tools take clicks. */
  get active() { return this.mode !== '' || this.panelOpen; }

  async load() {
    const {url} = this;
    if (this.isMask) say('Reading the mask…');
    const data = await get(url);
    if (url !== this.url) return;
    if (this.isMask) say(`The mask has ${data.features.length} outlines.`);
    this.clear();
    this.loaded = url;
    this.take(data);
    this.stop();
  }

  /** Use the outlines of the file. */
  take(data) {
    this.data = data;
    this.base = data.features.map(it => JSON.stringify(it));
  }

  /** Remember the outlines before a change, which must replace features and not change them. */
  remember() { this.past = [...this.past.slice(1 - MOST_UNDONE), [...this.data.features]]; }

  /** Undo the last change; return whether there was one. */
  undo() {
    if (this.mode || !this.past.length) return false;
    this.data.features = this.past.pop();
    this.chosen = -1;
    this.touch();
    this.show();
    this.pane.draw();
    say('Undone. Save to keep the change.');
    return true;
  }

  /** Note a change of the outlines. */
  touch() {
    this.changed = true;
    this.revision = (this.revision || 0) + 1;
  }

  stop() {
    this.mode = '';
    this.points = [];
    this.cross = null;
    this.show();
    this.pane.draw();
  }

  start(mode) {
    this.stop();
    this.mode = mode;
    this.chosen = -1;
    this.cross = this.pane.place();
    this.show();
    this.pane.draw();
    this.pane.picture.focus();
    say(`${this.isMask ? this.verb : 'Drawing'}: ${mode}. Click corners, or move the cross with the arrow keys and press Space; Enter finishes.`);
  }

  get verb() { return this.part === CUT ? 'Cut out' : 'Add tissue'; }

  get coordinates() { return this.points.map(point => this.inFile(point)); }

  /** Return a point of the slide as in the file. There is no tissue outside of the scanned area. */
  inFile({x, y}) {
    const [left, top] = this.data.origin, [, , width, height] = this.pane.slide.bounds;
    const within = (at, most) => this.isMask ? Math.min(Math.max(at, 0), most) : at;
    return [within(round(x - left), width), within(round(y - top), height)];
  }

  finish() {
    let ring = this.coordinates;
    if (this.mode === 'rectangle' && ring.length >= 2) {
      const [[a, b], [c, d]] = [ring[0], ring[ring.length - 1]];
      ring = a === c || b === d ? [] : [[a, b], [c, b], [c, d], [a, d]];
    }
    ring = ring.filter((point, i) => !i || point[0] !== ring[i - 1][0] || point[1] !== ring[i - 1][1]);
    if (ring.length < 3) {
      say('An area needs at least three corners.');
      return;
    }
    const name = this.isMask ? this.part.name : this.panel.querySelector('#class-name').value.trim();
    const properties = {objectType: 'annotation', ...(name ? {classification: this.isMask ? this.part : {name}} : {})};
    this.remember();
    this.data.features.push({
      type: 'Feature', id: newId(), geometry: {type: 'Polygon', coordinates: [[...ring, ring[0]]]}, properties,
    });
    this.touch();
    this.chosen = this.data.features.length - 1;
    const mode = this.mode;
    this.stop();
    say(`${this.isMask ? `${this.verb}: ${mode} done` : `${mode} of class ${name || 'none'} added`}. Save to keep it.`);
  }

  press(event, point) {
    if (this.mode === 'freehand' || this.mode === 'rectangle') {
      this.points = [point];
      this.dragging = true;
    } else if (!this.mode && this.chosen >= 0) this.corner = this.cornerAt(event.position);
    this.moved = false;
  }

  drag(event, point) {
    if (this.mode) event.preventDefaultAction = this.mode !== 'polygon';
    if (this.mode === 'rectangle' && this.dragging) this.points = [this.points[0], point];
    else if (this.mode === 'freehand' && this.dragging) {
      const last = this.pane.toScreen(this.points[this.points.length - 1]);
      if (Math.hypot(last.x - event.position.x, last.y - event.position.y) >= FREEHAND_STEP) this.points.push(point);
    } else if (this.corner) {
      event.preventDefaultAction = true;
      if (!this.moved) this.copyChosen();
      this.moved = true;
      this.moveCorner(point);
    }
    this.pane.draw();
  }

  release() {
    if (this.dragging && this.points.length > 1) this.finish();
    this.dragging = false;
    this.corner = null;
  }

  click(event, point) {
    if (!event.quick) return;
    if (this.mode === 'polygon') {
      event.preventDefaultAction = true;
      const first = this.points.length > 2 && this.pane.toScreen(this.points[0]);
      if (first && Math.hypot(first.x - event.position.x, first.y - event.position.y) < NEAR) this.finish();
      else this.points.push(point);
      this.pane.draw();
    } else if (!this.mode && this.panelOpen) {
      const context = document.createElement('canvas').getContext('2d');
      this.chosen = this.data.features.findLastIndex(it => {
        const path = featurePath(it, this.data.origin);
        return path && context.isPointInPath(path, point.x, point.y, 'evenodd');
      });
      this.show();
      this.pane.draw();
    }
  }

  /** Return the corner of the chosen outline near a screen point: its ring and number; null if there is none. */
  cornerAt(position) {
    const [left, top] = this.data.origin;
    for (const ring of ringsOf(this.data.features[this.chosen])) {
      for (let i = 0; i < ring.length - 1; i++) {
        const at = this.pane.toScreen({x: ring[i][0] + left, y: ring[i][1] + top});
        if (Math.hypot(at.x - position.x, at.y - position.y) < NEAR) return {ring, i};
      }
    }
    return null;
  }

  /** Replace the chosen outline by a copy, whose corner is moved. */
  copyChosen() {
    const number = ringsOf(this.data.features[this.chosen]).indexOf(this.corner.ring);
    this.remember();
    this.data.features[this.chosen] = structuredClone(this.data.features[this.chosen]);
    this.corner.ring = ringsOf(this.data.features[this.chosen])[number];
  }

  moveCorner(point) {
    const {ring, i} = this.corner;
    ring[i] = this.inFile(point);
    if (i === 0) ring[ring.length - 1] = ring[0];
    this.setChanged();
  }

  setChanged() {
    this.touch();
    this.showState();
  }

  /** Handle a key; return whether it was used. */
  key(event) {
    if (!this.mode) {
      if ((event.key === 'Delete' || event.key === 'Backspace') && this.chosen >= 0) { this.remove(this.chosen); return true; }
      return false;
    }
    const step = (event.shiftKey ? 1 : 16) * this.pane.place().pixel;
    const arrows = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
    if (arrows[event.key]) {
      this.cross.x += arrows[event.key][0] * step;
      this.cross.y += arrows[event.key][1] * step;
    } else if (event.key === ' ') {
      this.points.push({x: this.cross.x, y: this.cross.y});
      say(`Corner ${this.points.length} at x ${Math.round(this.cross.x)}, y ${Math.round(this.cross.y)}.`);
      if (this.mode === 'rectangle' && this.points.length === 2) this.finish();
    } else if (event.key === 'Enter') this.finish();
    else if (event.key === 'Backspace') this.points.pop();
    else if (event.key === 'Escape') this.stop();
    else if (event.key === 'x' && this.isMask) this.setPart(this.part === CUT ? TISSUE : CUT);
    else return false;
    this.pane.draw();
    return true;
  }

  /** Choose whether new outlines add tissue or cut out. */
  setPart(part) {
    this.part = part;
    this.show();
    say(`${this.verb}.`);
  }

  remove(number) {
    this.remember();
    this.data.features.splice(number, 1);
    this.chosen = -1;
    this.touch();
    this.show();
    this.pane.draw();
    say('Outline removed. Save to keep the change.');
  }

  /** Save; if the file was changed meanwhile, ask. */
  async save() {
    if (this.saving) return;
    this.saving = true;
    try { await this.send(); } finally { this.saving = false; this.showState(); }
    if (document.activeElement === document.body) this.pane.picture.focus();  // the button was disabled
  }

  async send() {
    if (!this.isLoaded) return;
    const {revision, data} = this, sent = data.features.map(it => JSON.stringify(it));
    const response = await fetch(this.url, {
      method: 'PUT', headers: {'content-type': 'application/json'},
      body: JSON.stringify({features: this.data.features, version: this.data.version}),
    }).catch(error => ({ok: false, status: 0, json: async () => ({error: error.message})}));
    const answer = await response.json().catch(() => ({error: response.statusText}));
    if (response.status === 409) {
      this.conflict = answer.error;
      this.show();
      return;
    }
    if (!response.ok) { say(`Not saved: ${answer.error}`); return; }
    if (data !== this.data) return;  // another slide is open
    this.data.version = answer.version;
    this.data.file = answer.file;
    this.changed = revision !== this.revision;  // outlines may have changed meanwhile
    if (this.isMask && !this.changed) {  // as the server has merged them
      this.data = {...data, features: answer.features, start: ''};
      this.past = [];
      this.chosen = -1;
    }
    this.base = this.changed ? sent : this.data.features.map(it => JSON.stringify(it));
    this.conflict = '';
    this.pane.outlines = null;
    this.show();
    this.pane.draw();
    say(`Saved as ${this.data.file}; the previous version ends in .previous.`);
  }

  /** After a conflict: keep the outlines of both, or drop ours. */
  async resolve(keep) {
    const text = it => JSON.stringify(it);
    const mine = this.data.features, before = new Set(this.base);
    const theirs = await get(this.url);
    this.conflict = '';
    this.chosen = -1;
    this.take(theirs);
    this.changed = false;
    this.past = [];
    if (keep) {
      // Theirs, without those that we removed or changed; and ours that are new or changed.
      const kept = new Set(mine.map(text)), known = new Set(theirs.features.map(text));
      const left = theirs.features.filter(it => kept.has(text(it)) || !before.has(text(it)));
      const added = mine.filter(it => !before.has(text(it)) && !known.has(text(it)));
      this.data.features = [...left, ...added];
      this.touch();
      await this.save();
    }
    this.show();
    this.pane.draw();
  }

  draw(context, scale) {
    if (this.isMask) fillTissue(context, this.canvas ||= document.createElement('canvas'), this.data);
    const numbers = classColours(this.data.features);
    this.data.features.forEach((feature, i) => {
      const path = featurePath(feature, this.data.origin);
      if (path) strokeTwice(context, path, scale, outlineColour(feature, numbers), i === this.chosen ? 4 : 2);
    });
    const [left, top] = this.data.origin;
    if (this.chosen >= 0) {
      const side = NEAR / scale;
      context.fillStyle = '#ffd400';
      for (const ring of ringsOf(this.data.features[this.chosen])) {
        for (const [x, y] of ring) context.fillRect(x + left - side / 2, y + top - side / 2, side, side);
      }
    }
    if (this.points.length) {
      const path = new Path2D();
      const [a, b] = this.points;
      if (this.mode === 'rectangle' && b) path.rect(a.x, a.y, b.x - a.x, b.y - a.y);
      else this.points.forEach(({x, y}, i) => i ? path.lineTo(x, y) : path.moveTo(x, y));
      strokeTwice(context, path, scale, '#ffd400', 2);
    }
    if (this.mode && this.cross) {
      const {x, y} = this.cross, arm = 12 / scale, path = new Path2D();
      path.moveTo(x - arm, y); path.lineTo(x + arm, y);
      path.moveTo(x, y - arm); path.lineTo(x, y + arm);
      strokeTwice(context, path, scale, '#ffffff', 1.5);
    }
  }

  /** Show the tools, the list of outlines and the state of the file. */
  show() {
    const {panel} = this;
    if (!this.panelOpen) { panel.replaceChildren(); return; }
    const focused = panel.contains(document.activeElement) && document.activeElement.id;
    const choice = this.kinds.length > 1 ? [choices('Draw', 'kind', this.kinds.map(kind => (
      {id: kind, text: TITLES[kind], checked: kind === this.kind, choose: () => this.choose(kind)})))] : [];
    if (this.failed) {
      panel.replaceChildren(...choice, make('p', {role: 'alert'}, this.failed));
      if (focused) document.getElementById(focused)?.focus();
      return;
    }
    const tools = ['polygon', 'rectangle', 'freehand'].map(mode => make('button', {
      id: `draw-${mode}`, onclick: () => this.mode === mode ? this.stop() : this.start(mode), 'aria-pressed': this.mode === mode,
    }, mode[0].toUpperCase() + mode.slice(1)));
    const numbers = classColours(this.data.features);
    const outlines = this.data.features.map((feature, i) => this.row(feature, i, numbers));
    const conflict = this.conflict ? [make('div', {className: 'conflict', role: 'alert'},
      make('p', {}, `Not saved: ${this.conflict}.`),
      make('button', {onclick: () => this.resolve(true)}, 'Save the outlines of both'),
      make('button', {onclick: () => this.resolve(false)}, 'Discard mine'))] : [];
    panel.replaceChildren(
      ...choice, make('p', {id: 'drawing-file', className: 'soft'}),
      ...(this.isMask ? this.maskChoice() : this.classChoice()),
      make('div', {className: 'tools'}, ...tools, make('button', {id: 'undo', onclick: () => this.undo()}, 'Undo'),
        make('button', {id: 'save', onclick: () => this.save()}, 'Save')),
      ...conflict,
      make('ul', {className: 'outlines'}, ...outlines));
    this.showState();
    if (focused) (document.getElementById(focused) || panel.querySelector('#class-name, [name=part]:checked')).focus();
  }

  /** The class of new outlines. */
  classChoice() {
    const value = this.panel.querySelector('#class-name')?.value || '';
    const names = [...classColours(this.data.features).keys()].filter(Boolean);
    return [
      make('label', {}, 'Class of new outlines ', make('input', {id: 'class-name', value, list: 'class-names', maxLength: 100})),
      make('datalist', {id: 'class-names'}, ...names.map(name => make('option', {value: name}))),
    ];
  }

  /** Whether new outlines add tissue or cut out, and how the store gets the mask. */
  maskChoice() {
    const part = (id, text, value) => ({id, text, checked: this.part === value, choose: () => this.setPart(value)});
    return [
      make('p', {className: 'soft'}, `${STORE} `, make('code', {}, 'histopipe ingest SLIDES --tissue FOLDER --out NEW.lmdb')),
      choices('New outlines', 'part', [part('add', 'add tissue', TISSUE), part('cut', 'cut out', CUT)]),
    ];
  }

  /** Show whether the outlines are saved. */
  showState() {
    const line = this.panel.querySelector('#drawing-file'), save = this.panel.querySelector('#save');
    const {file, start, target} = this.data;
    const first = file ? `outlines of ${file}. Save writes ${target}, which ingest reads in place of it` : `${start}. Save writes ${target}`;
    const text = start ? `No outlines saved yet. Start: ${first}` : `File: ${file || 'none yet'}`;
    if (line) line.textContent = text + (this.changed ? ' (not saved)' : '');
    const undo = this.panel.querySelector('#undo');
    if (undo) undo.disabled = !this.past.length;
    if (save) save.disabled = !this.changed || Boolean(this.saving);
  }

  row(feature, i, numbers) {
    const shape = feature.geometry?.type || 'nothing';
    const name = this.isMask ? make('span', {}, nameOfPart(feature))
      : make('input', {id: `outline-class-${i}`, value: className(feature), maxLength: 100, 'aria-label': `Class of outline ${i + 1}`, placeholder: 'no class'});
    name.addEventListener('change', () => {
      const properties = {...feature.properties};
      if (name.value.trim()) properties.classification = {name: name.value.trim()};
      else delete properties.classification;
      this.remember();
      this.data.features[i] = {...this.data.features[i], properties};
      this.touch();
      this.showState();
      this.pane.draw();
    });
    const choose = make('button', {
      id: `outline-${i}`, 'aria-pressed': i === this.chosen, title: 'Show this outline',
      onclick: () => { this.chosen = i; this.showChosen(); this.show(); this.pane.draw(); },
    }, `${i + 1} ${shape}`);
    choose.style.borderLeft = `6px solid ${outlineColour(feature, numbers)}`;
    const remove = make('button', {id: `outline-remove-${i}`, 'aria-label': `Remove outline ${i + 1}`, onclick: () => this.remove(i)}, '×');
    return make('li', {}, choose, name, remove);
  }

  showChosen() {
    const points = ringsOf(this.data.features[this.chosen]).flat();
    if (!points.length) return;
    const [left, top] = this.data.origin;
    const [xs, ys] = [points.map(it => it[0] + left), points.map(it => it[1] + top)];
    const least = at => at.reduce((a, b) => Math.min(a, b)), most = at => at.reduce((a, b) => Math.max(a, b));
    const side = Math.max(most(xs) - least(xs), most(ys) - least(ys), 50);
    this.pane.go({
      x: (least(xs) + most(xs)) / 2, y: (least(ys) + most(ys)) / 2,
      pixel: 1.3 * side / Math.min(this.pane.picture.clientWidth, this.pane.picture.clientHeight),
    });
  }
}

const round = value => Math.round(value * 10) / 10;

// crypto.randomUUID exists only on pages of this machine, or with https.
const newId = () => crypto.randomUUID?.()
  || [...crypto.getRandomValues(new Uint8Array(16))].map(it => it.toString(16).padStart(2, '0')).join('');
