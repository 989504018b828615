// Label patches by keys: the journal of the rater, the classifier that learns, the next patches, and other raters.

import {classColour} from './layers.js';
import {get} from './pane.js';
import {make, say} from './panel.js';
import {Selection} from './selection.js';

const POLL_MS = 700, RETRY_MS = 2000, SHEET = 24;
const ORDERS = {
  far: 'Unlike all labels', random: 'Random', uncertain: 'Most uncertain', certain: 'Most certain of a class',
  contradicted: 'Labels that others contradict',
};
const number = value => value.toLocaleString('en'), counted = (value, word) => `${number(value)} ${word}${value === 1 ? '' : 's'}`, decimal = value => value.toFixed(3);

// crypto.randomUUID exists only on pages of this machine, or with https.
const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map(it => it.toString(16).padStart(2, '0')).join('');

/** The panel "Label". */
export class Labels extends EventTarget {
  constructor(panel, jump) {
    super();
    this.panel = panel;
    this.jump = jump;
    this.selections = new Map();  // by pane
    this.waiting = [];  // acts that are not saved
    this.sheet = [];
    this.state = null;
    this.mode = 'click';
    this.build();
    this.ready = this.poll();
    window.addEventListener('focus', () => this.poll());
  }

  /** Let a pane show labels, and predictions of the classifier. */
  add(pane) {
    const selection = new Selection(pane);
    selection.mode = this.mode;
    selection.addEventListener('select', () => this.showSelection());
    selection.addEventListener('key', event => { if (this.key(event.detail)) event.preventDefault(); });
    this.selections.set(pane, selection);
    pane.extraLayers = () => this.layersOf(pane);
    return selection;
  }

  remove(pane) { this.selections.delete(pane); }

  layersOf(pane) {
    if (!pane.slide.grids.length || pane.slide.grids[0].source !== 'store') return [];
    const layer = (key, title, classes, path, part) => ({
      key, title, classes, group: 'labels', grid: 0, low: 0, high: 1, opacity: 0, range: [-Infinity, Infinity],
      loading: null, last: part === null ? 0.6 : 0.4,
      load: () => get(`${pane.base}/${path}`, 'arrayBuffer').then(buffer => {
        const values = new Float32Array(buffer);
        return part === null ? values : values.subarray(part * values.length / 2, (part + 1) * values.length / 2);
      }),
    });
    const names = this.state.classes;
    return [
      layer('mine', `Labels of ${this.state.rater}`, [...names, this.state.unsure], 'labels', null),
      layer('learned', 'Predicted by the labels', names, 'learned', 0),
      layer('learned-p', 'Probability of the predicted class', [], 'learned', 1),
    ];
  }

  /** Show the labels of a slide that was opened, unless the user has hidden them. */
  async opened(pane) {
    const mine = pane.layers.find(it => it.key === 'mine');
    if (mine && !mine.opacity) await pane.show(mine, mine.last).catch(error => say(error.message));
    if (this.state.learned) await this.showLearned(pane);
  }

  async showLearned(pane) {
    const learned = pane.layers?.find(it => it.key === 'learned');
    if (learned && pane.slide?.similar) await pane.show(learned, learned.opacity || learned.last).catch(() => {});
  }

  // Acts

  /** Label patches, [[slide number, x, y], ...], with the name of a class; null removes labels. */
  label(patches, name) {
    if (!patches.length) { say('Select patches first: click one, or draw a rectangle or a lasso.'); return; }
    const offered = this.sheet.filter(it => it.offered).map(it => [it.number, it.x, it.y]);
    const isOffered = ([n, x, y]) => offered.some(it => it[0] === n && it[1] === x && it[2] === y);
    this.send({act: 'label', class: name, patches, offered: offered.length ? patches.filter(isOffered) : []});
  }

  send(act) {
    this.waiting.push({id: newId(), session: this.state.session, ...act});
    this.showMark(act, false);
    this.showState();
    if (this.waiting.length === 1) this.work();
  }

  /** Send the acts one after the other. One that gets no answer is sent again, with the same id. */
  async work() {
    while (this.waiting.length) {
      let response, answer;
      try {
        response = await fetch('labels', {
          method: 'POST', headers: {'content-type': 'application/json'}, body: JSON.stringify(this.waiting[0]),
        });
        answer = await response.json().catch(() => ({error: response.statusText}));
        // Only an act that is wrong is dropped: others wait for the right viewer.
        this.failure = response.ok || response.status === 400 ? '' : answer.error || response.statusText;
      } catch (error) { this.failure = error.message; }
      if (this.failure) {
        this.showState();
        await new Promise(resolve => { setTimeout(resolve, RETRY_MS); });
        continue;
      }
      const act = this.waiting.shift();
      this.showMark(act, response.ok);
      if (response.ok) this.saved(answer, act); else say(`Not saved: ${answer.error}`);
      this.showState();
    }
  }

  /** Announce a mark of a slide that is sent or, with `saved`, on the disk. */
  showMark(act, saved) {
    if (act.act === 'mark') this.dispatchEvent(new CustomEvent('mark', {detail: {...act, saved}}));
  }

  saved(answer, act) {
    this.state = answer;
    this.savedAt = new Date().toLocaleTimeString('en-GB');
    if (this.panel.hidden && answer.changed.length) say(`${counted(answer.changed.length, 'label')} changed and saved.`);
    if (act.act === 'mark') { this.showState(); return; }
    for (const [pane] of this.selections) this.update(pane, answer.changed);
    for (const item of this.sheet) {
      const change = answer.changed.find(([n, x, y]) => n === item.number && x === item.x && y === item.y);
      if (change) item.value = change[3];
    }
    this.show();
    this.poll();
    this.onChange?.();
  }

  /** Change the labels that a pane shows; without changes, as after a repeated request, load them again. */
  async update(pane, changed) {
    const layer = pane.layers?.find(it => it.key === 'mine');
    if (!layer?.loading) return;
    if (!changed.length) { layer.loading = layer.values = null; if (layer.opacity) await pane.show(layer, layer.opacity); return; }
    const grid = await pane.grid(0), values = await pane.values(layer);
    grid.rowOf ||= new Map(Array.from(grid.x, (x, row) => [`${x},${grid.y[row]}`, row]));
    for (const [n, x, y, value] of changed) {
      const row = n === pane.number ? grid.rowOf.get(`${x},${y}`) : undefined;
      if (row !== undefined) values[row] = value ?? NaN;
    }
    pane.repaint();
    pane.dispatchEvent(new Event('layers'));
  }

  /** Ask for the state until the classifier has learned and the candidates are loaded. */
  async poll() {
    clearTimeout(this.timer);
    const {version, acts} = this.state || {}, passing = this.state?.pass.running;
    try { this.state = await get('labels'); } catch (error) { say(error.message); return; }
    this.show();
    // Another page of the same rater may have labelled meanwhile.
    if (acts !== undefined && acts !== this.state.acts && !this.waiting.length) for (const [pane] of this.selections) await this.update(pane, []);
    if (version !== undefined && version !== this.state.version) {
      for (const [pane] of this.selections) {
        for (const layer of pane.layers?.filter(it => it.key.startsWith('learned')) || []) {
          layer.loading = layer.values = layer.raster = null;
          if (!this.state.learned && layer.opacity) layer.opacity = 0;
        }
        if (this.state.learned) await this.showLearned(pane); else if (pane.slide) pane.repaint();
      }
      this.onChange?.();
    }
    if (passing) this.showMeans();
    if (this.state.learning || this.state.pass.running || (this.state.features && !this.state.loaded)) this.timer = setTimeout(() => this.poll(), POLL_MS);
  }

  // Keys

  /** Handle a key; return whether it was used. */
  key(event, patches = this.selected()) {
    const name = event.repeat ? undefined : this.classOf(event.key);
    if (name !== undefined) { this.label(patches, name); return true; }
    if (event.key === 'q') { this.offer(); return true; }
    return false;
  }

  /** Return the class of a key, null for the key that removes labels, and undefined for others. */
  classOf(key) {
    if (key === 'u') return this.state.unsure;
    if (key === 'Backspace' || key === 'Delete') return null;
    return /^[1-9]$/.test(key) ? this.state.classes[key - 1] : undefined;
  }

  selected() {
    const {pane} = this, grid = pane?.slide?.grids[0];
    return [...this.selections.get(pane)?.rows || []].map(row => [pane.number, grid.x[row], grid.y[row]]);
  }

  /** Handle a key anywhere on the page; return whether it was used. */
  pageKey(event, patches) {
    if ((event.ctrlKey || event.metaKey) && /^[zy]$/i.test(event.key)) {
      const redo = event.shiftKey || event.key.toLowerCase() === 'y';
      this.send({act: redo ? 'redo' : 'undo'});
      return true;
    }
    return !event.ctrlKey && !event.metaKey && !event.altKey && this.key(event, patches);
  }

  // The panel

  build() {
    const button = (id, text, onclick) => make('button', {id, onclick}, text);
    const part = id => make('div', {id});
    this.panel.append(
      make('p', {id: 'label-state', className: 'label-state', role: 'status'}), part('label-classes'),
      make('div', {className: 'tools', role: 'group', 'aria-label': 'Selection'}, ...['click', 'rectangle', 'lasso'].map(
        mode => make('button', {id: `select-${mode}`, 'aria-pressed': mode === this.mode, onclick: () => this.choose(mode)}, mode[0].toUpperCase() + mode.slice(1))),
        button('undo', 'Undo', () => this.send({act: 'undo'})), button('redo', 'Redo', () => this.send({act: 'redo'}))),
      make('p', {id: 'label-selection', className: 'soft', role: 'status'}),
      make('h3', {}, 'Next patches'),
      make('div', {className: 'tools'}, make('select', {id: 'order', 'aria-label': 'Order of the next patches'}),
        make('select', {id: 'order-class', 'aria-label': 'Class', hidden: true}), button('offer', 'Show (q)', () => this.offer())),
      make('div', {id: 'sheet', className: 'gallery', role: 'group', 'aria-label': 'Next patches: keys label the one in focus'}),
      make('h3', {}, 'Held-out part'), part('accuracy'),
      make('h3', {}, 'All slides'),
      make('div', {className: 'tools'}, button('pass', 'Predict all slides', () => this.predictAll())),
      make('p', {id: 'pass-state', className: 'soft', role: 'status'}),
      make('h3', {}, 'Other raters'), part('raters'));
    this.part = id => this.panel.querySelector(`#${id}`);
    this.part('order').addEventListener('change', () => { this.part('order-class').hidden = this.part('order').value !== 'certain'; });
    this.part('sheet').addEventListener('keydown', event => this.sheetKey(event));
  }

  choose(mode) {
    this.mode = mode;
    for (const [pane, selection] of this.selections) { selection.mode = mode; pane.draw(); }
    for (const it of ['click', 'rectangle', 'lasso']) this.part(`select-${it}`).setAttribute('aria-pressed', it === mode);
    this.pane?.picture.focus();
  }

  show() {
    const {state} = this;
    const keys = [...state.classes.map((name, i) => [String(i + 1), name, name]), ['u', state.unsure, state.unsure], ['⌫', 'no label', null]];
    this.part('label-classes').replaceChildren(...keys.map(([key, text, name], i) => {
      const count = name === null ? '' : number(state.counts[i]);
      const it = make('button', {className: 'class-key', onclick: () => this.label(this.selected(), name), title: `Key ${key}`},
        make('kbd', {}, key), text, make('span', {className: 'soft'}, count));
      if (name !== null) it.style.borderLeft = `8px solid ${classColour(name, i)}`;
      return it;
    }));
    this.part('undo').disabled = !state.undo;
    this.part('redo').disabled = !state.redo;
    const order = this.part('order');
    if (!order.options.length) {
      order.append(...state.orders.map(value => make('option', {value}, ORDERS[value])));
      this.part('order-class').append(...state.classes.map((name, value) => make('option', {value}, name)));
    }
    for (const option of order.options) option.disabled = !state.learned && /certain|contradicted/.test(option.value);
    this.part('offer').disabled = !state.features;
    this.part('pass').disabled = !state.learned || state.pass.running;
    const {running, slides, of} = state.pass;
    this.part('pass-state').textContent = running ? `${number(slides)} of ${counted(of, 'slide')}.` : slides ? 'Done: see the list and the table of slides. Held-out patients are left out.' : '';
    this.showState();
    this.showSelection();
    this.showSheet();
    this.showAccuracy();
    this.showRaters();
  }

  /** Show whether all acts are saved. */
  showState() {
    const {state, waiting, failure} = this, total = state.counts.reduce((a, b) => a + b, 0);
    const text = waiting.length
      ? `Not saved yet: ${waiting.length}${failure ? `. ${failure}. Trying again` : ''}`
      : `${counted(total, 'label')} of ${state.rater} saved${this.savedAt ? ` at ${this.savedAt}` : ''}. The name is no login.`;
    for (const line of document.querySelectorAll('.label-state')) {
      if (line.textContent !== text) line.textContent = text;
      line.classList.toggle('failed', Boolean(failure && waiting.length));
    }
  }

  showSelection() {
    const count = this.selections.get(this.pane)?.rows.size || 0;
    this.part('label-selection').textContent = count ? `${number(count)} selected: press a key` : 'Click a patch, with Shift several; then press a key.';
  }

  /** Select patches of the map, [[slide number, x, y], ...], on the slide, and show some of them in the sheet. */
  async take(pane, patches, sheet) {
    this.sheet = sheet;
    this.showSheet(true);
    const selection = this.selections.get(pane);
    if (!pane?.slide?.grids.length) return;
    const grid = await pane.grid(0), here = new Set(patches.filter(([n]) => n === pane.number).map(([, x, y]) => `${x},${y}`));
    selection.set([...grid.x.keys()].filter(row => here.has(`${grid.x[row]},${grid.y[row]}`)));
  }

  // The contact sheet

  async offer() {
    if (!this.state.features) { say('Start the viewer with --features FOLDER for this.'); return; }
    const order = this.part('order').value, of = this.part('order-class').value || 0;
    try { this.sheet = await get(`queue?order=${order}&class=${of}&count=${SHEET}`); } catch (error) { say(error.message); return; }
    this.showSheet(true);
    this.part('sheet').querySelector('button')?.focus();
    say(this.sheet.length ? `${this.sheet.length} patches` : 'There is no such patch.');
  }

  showSheet(isNew = false) {
    const sheet = this.part('sheet');
    const text = it => it.value !== undefined && it.value !== null ? [...this.state.classes, this.state.unsure][it.value]
      : it.label ? `${it.label}, p ${it.p.toFixed(2)}` : it.predicted ? `${it.predicted}? ${it.p.toFixed(2)}` : it.labels ? Object.entries(it.labels).map(pair => pair.join(': ')).join(', ') : '';
    if (isNew || sheet.childElementCount !== this.sheet.length) {
      sheet.replaceChildren(...this.sheet.map((it, i) => make('button', {className: 'thumb', onclick: () => this.jump(it), 'aria-label': `Patch ${i + 1} of ${it.slide}`},
        make('img', {alt: '', loading: 'lazy', src: `slides/${it.number}/picture/${it.x}/${it.y}${it.size ? `?size=${it.size}` : ''}`}), make('span'))));
    }
    this.sheet.forEach((it, i) => {
      const button = sheet.children[i], has = it.value !== undefined && it.value !== null;
      button.lastChild.textContent = text(it);
      button.style.borderColor = has ? classColour([...this.state.classes, this.state.unsure][it.value], it.value) : '';
      button.style.borderWidth = has ? '3px' : '';
    });
  }

  sheetKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const buttons = [...this.part('sheet').children], at = buttons.indexOf(document.activeElement);
    if (at < 0) return;
    const columns = buttons.filter(it => it.offsetTop === buttons[0].offsetTop).length;
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns}[event.key];
    const name = event.repeat ? undefined : this.classOf(event.key), it = this.sheet[at];
    if (step) buttons[at + step]?.focus();
    else if (name !== undefined) {
      this.label([[it.number, it.x, it.y]], name);
      (buttons[at + 1] || this.part('offer')).focus();  // a key more would change the last one
      if (!buttons[at + 1]) say('That was the last patch of the sheet: q shows the next ones.');
    } else return;
    event.preventDefault();
  }

  // Results

  /** Predict all slides with the current classifier. */
  async predictAll() {
    const response = await fetch('pass', {method: 'POST'}).catch(error => ({statusText: error.message}));
    if (!response.ok) say(`The slides could not be predicted: ${response.statusText}`);
    await this.poll();
  }

  /** Show the predictions of all slides in the list. */
  async showMeans() {
    try { this.onMeans?.({name: 'labels', classes: this.state.classes}, await get('pass')); } catch (error) { say(error.message); }
  }

  showAccuracy() {
    const {accuracy: it, classes, features, fewest, learned} = this.state, lines = [];
    const labels = this.state.counts.slice(0, classes.length).reduce((a, b) => a + b, 0);
    if (!features) lines.push('Without --features FOLDER nothing is learned from the labels.');
    else if (!learned) lines.push(`A classifier learns from ${fewest} labels of two classes on (of patients that are not held out); so far ${counted(labels, 'label')}.`);
    if (it?.patches) {
      const of = it.by_region ? 'held-out regions of the only patient' : `${it.patients} held-out patients`;
      lines.push(`${number(it.patches)} random patches of ${of}.`);
      if (it.right_by_class) lines.push(`Right: ${classes.map((name, i) => `${name} ${it.right_by_class[i]} of ${it.patches_by_class[i]}`).join(', ')}.`);
      const names = {balanced_accuracy: 'Balanced accuracy', auc: 'AUC'};
      for (const [name, [value, interval]] of Object.entries(it.metrics)) {
        lines.push(`${names[name]} ${decimal(value)}${interval ? ` (95 % interval ${interval.map(decimal).join(' to ')})` : ''}.`);
      }
      if (it.by_region) lines.push('One patient allows no interval, and shows nothing about other patients.');
      else if (!Object.keys(it.metrics).length && learned) lines.push(`An accuracy needs ${it.fewest} held-out patients, and two of each class.`);
      if (Object.keys(it.metrics).length) lines.push('If you stop labelling at a good value, it is too good.');
    } else if (features) lines.push('No label yet: a quarter of the next patches are of the held-out part. They measure the classifier, which never learns from them.');
    const texts = lines.map(text => make('p', {className: 'soft'}, text));
    this.part('accuracy').replaceChildren(...texts);
  }

  showRaters() {
    const others = this.state.raters.filter(name => name !== this.state.rater), part = this.part('raters');
    if (part.dataset.names === others.join()) return;
    part.dataset.names = others.join();
    part.replaceChildren(others.length ? make('div', {className: 'tools'}, ...others.map(
      name => make('button', {onclick: () => this.compare(name)}, `Compare with ${name}`)))
      : make('p', {className: 'soft'}, 'None has a journal in this folder.'), make('div', {id: 'agreement'}));
  }

  async compare(name) {
    const part = this.part('agreement');
    try {
      const it = await get(`disagreements?rater=${encodeURIComponent(name)}`);
      const kappa = it.kappa === null ? "Cohen's kappa is undefined" : `Cohen's kappa ${decimal(it.kappa)}${it.interval ? ` (95 % interval ${it.interval.map(decimal).join(' to ')})` : ''}`;
      part.replaceChildren(make('p', {}, `${kappa}; ${number(it.patches)} patches of ${it.patients} patients with a class of both.`),
        ...it.notes.map(text => make('p', {className: 'soft'}, text)),
        make('p', {}, `${counted(it.disagreements, 'disagreement')}${it.list.length ? ', in the sheet above' : ''}.`));
      this.sheet = it.list;
      this.showSheet(true);
    } catch (error) { part.replaceChildren(make('p', {role: 'alert'}, error.message)); }
  }
}
