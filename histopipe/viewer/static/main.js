// The page: list of slides, one or two pictures, the panel, and the address that holds the whole view.

import {Drawing} from './drawing.js';
import {Labels} from './labels.js';
import {PatchMap} from './map.js';
import {get, Pane} from './pane.js';
import {ErrorPanel, LayerPanel, make, PatchPanel, say, setNumbers} from './panel.js';
import {Slides} from './slides.js';
import {Table} from './table.js';

const $ = selector => document.querySelector(selector);
const WRITE_MS = 200;  // browsers limit how often the address may change

const all = await get('slides').catch(error => { say(error.message); throw error; });
for (const note of all.notes) say(note);

// Panes

const panes = [], drawings = new Map(), drawn = ['drawing', 'tissue'].filter(kind => all[kind]);
let active = null, leader = null, offset = null;

function addPane() {
  const element = document.createElement('section');
  $('#panes').append(element);
  const pane = new Pane(element, `Picture ${panes.length + 1}`);
  panes.push(pane);
  pane.addEventListener('activate', () => activate(pane));
  pane.addEventListener('move', () => { follow(pane); writeLater(); });
  pane.addEventListener('open', () => { labels?.opened(pane); relate(); if (pane === active) showActive(); writeLater(); });
  pane.addEventListener('layers', writeLater);
  pane.addEventListener('lost', () => fetch('slides').catch(() => say('The viewer has ended, or cannot be reached: pictures are incomplete.')));
  pane.addEventListener('select', () => { if (pane === active) showPatch(true); writeLater(); });
  if (drawn.length) drawings.set(pane, new Drawing(pane, $('#draw'), drawn));
  if (labels) labels.add(pane);
  return pane;
}

function activate(pane) {
  leader = pane;
  if (active === pane) return;
  active = pane;
  for (const it of panes) it.element.classList.toggle('active', it === pane && panes.length > 1);
  showActive();
}

const layerPanel = new LayerPanel($('#layers'));
const patchPanel = new PatchPanel($('#patch'), jump);
const errorPanel = new ErrorPanel($('#errors'), all.sources, all.labels, jump);
const labels = all.labelling ? new Labels($('#label'), jump) : null;
if (labels) await labels.ready; else $('#label').append(make('p', {className: 'soft'}, 'Labelling is off. Start the viewer with --journal FOLDER --rater NAME.'));
const map = all.features ? new PatchMap($('#map'), all.slides, () => active, jump, (patches, sheet) => labels?.take(active, patches, sheet)) : null;
if (map && labels) labels.onChange = () => map.refresh();
if (!map) $('#map').append(make('p', {className: 'soft'}, 'There is no map. Start the viewer with --features FOLDER.'));
const slides = new Slides(all, labels, name => open(name)), {numbers} = slides;
const table = new Table(slides, () => active.picture.focus());
setNumbers(name => numbers.get(name));
slides.update();
if (labels) labels.onMeans = (source, metrics) => slides.addSource(source, metrics);
if (!drawn.length) $('#draw').append(make('p', {className: 'soft'}, 'Drawing is off. Start the viewer with --annotations FOLDER, or with --tissue FOLDER to correct tissue masks.'));

function showActive() {
  layerPanel.show(active);
  showPatch(false);
  if (!$('#draw').hidden && drawings.get(active)) openDrawing();
  if (!$('#label').hidden) openLabels();
  if (active.slide) slides.select(active.slide.name);
}

function showPatch(turn) {
  if (turn && active.selected && !$('#patch').offsetParent && $('#draw').hidden && $('#label').hidden && $('#map').hidden) chooseTab('patch');
  patchPanel.show(active).catch(error => say(error.message));
}

/** Open a slide in the active pane, or the given one. */
async function open(name, view = null, layers = null, pane = active) {
  const number = numbers.get(name);
  if (number === undefined) { say(`There is no slide ${name}.`); return; }
  const drawing = drawings.get(pane);
  if (drawing && !drawing.mayLeave()) return;
  if (drawing) drawing.clear();
  if (pane.tools === drawing) pane.tools = null;
  const kept = layers || pane.layers?.filter(isUsed).map(({key, opacity, range}) => ({key, opacity, range}));
  try {
    await pane.open(number, view, kept);
    const {grids} = pane.slide;
    say(`${name}: ${grids.length ? `${grids[0].count.toLocaleString('en')} patches` : 'no patches'}`);
  } catch (error) { say(error.message); }
}

/** Whether a layer is visible, or hides patches. */
const isUsed = it => it.opacity || (it.range || []).some(Number.isFinite);

/** Select the patch at a corner of a slide, which is opened first. */
async function jump({slide, x, y}) {
  if (active.slide?.name !== slide) await open(slide);
  if (active.slide?.name === slide) await active.jump(x, y);
}

// Two panes

function relate() {
  if (panes.length < 2 || !panes.every(pane => pane.slide && pane.viewer.world.getItemCount())) { offset = null; return; }
  const [a, b] = panes.map(micrometres);
  offset = {x: b.x - a.x, y: b.y - a.y, factor: b.pixel / a.pixel};
}

/** The place of a pane in micrometres; in pixels if a scale is unknown. */
function micrometres(pane) {
  const unit = panes.every(it => it.slide.mpp) ? pane.slide.mpp : 1;
  const {x, y, pixel} = pane.place(true);
  return {x: x * unit, y: y * unit, pixel: pixel * unit, unit};
}

function follow(pane) {
  if (!offset || pane !== leader || $('#sync').getAttribute('aria-pressed') !== 'true') return;
  const other = panes.find(it => it !== pane);
  if (!other?.slide) return;
  const from = micrometres(pane), {unit} = micrometres(other), sign = pane === panes[0] ? 1 : -1;
  other.go({
    x: (from.x + sign * offset.x) / unit, y: (from.y + sign * offset.y) / unit, pixel: from.pixel * offset.factor ** sign / unit,
  });
}

async function compare(on, name = null, view = null, layers = null) {
  if (on === (panes.length === 2) || (!on && drawings.get(panes[1])?.mayLeave() === false)) return;
  $('#compare').setAttribute('aria-pressed', on);
  $('#sync').hidden = !on;
  if (on) {
    const place = panes[0].place(), second = addPane();
    $('#panes').classList.add('two');
    await open(name || panes[0].slide.name, view || place, layers, second);
    panes[0].go(place);  // it became narrower
    activate(second);
    leader = panes[0];
    relate();
  } else {
    const second = panes.pop();
    second.viewer.destroy();
    second.element.remove();
    drawings.delete(second);
    labels?.remove(second);
    offset = null;
    $('#panes').classList.remove('two');
    activate(panes[0]);
  }
  writeLater();
}

// Tabs

const tabs = ['layers', 'patch', 'errors', 'draw', 'label', 'map'];

function chooseTab(name) {
  for (const it of tabs) {
    $(`#tab-${it}`).setAttribute('aria-selected', it === name);
    $(`#tab-${it}`).tabIndex = it === name ? 0 : -1;
    $(`#${it}`).hidden = it !== name;
  }
  if (name === 'errors') errorPanel.first?.();
  for (const drawing of drawings.values()) drawing.panelOpen = name === 'draw';
  for (const pane of panes) if (pane.tools && pane.tools === labels?.selections.get(pane)) pane.tools = null;
  if (name === 'draw') openDrawing();
  if (name === 'label' || name === 'map') openLabels();
  if (name === 'map') map?.open();
}

function openLabels() {
  if (!labels) return;
  labels.pane = active;
  active.tools = labels.selections.get(active);
  labels.showSelection();
  active.draw();
}

async function openDrawing() {
  const drawing = drawings.get(active);
  if (!drawing || !active.slide) return;
  if (active.tools !== drawing || !drawing.isLoaded) {
    try { await drawing.load(); } catch (error) { drawing.fail(error.message); return; }
    if (!drawing.isLoaded) return;  // another slide is being opened
    active.tools = drawing;
  }
  drawing.show();
  active.draw();
}

for (const name of tabs) {
  $(`#tab-${name}`).addEventListener('click', () => chooseTab(name));
  $(`#tab-${name}`).addEventListener('keydown', event => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(name) + step + tabs.length) % tabs.length];
    chooseTab(next);
    $(`#tab-${next}`).focus();
  });
}

// Address: slide, place, layers and patch of each pane

let writing = 0, written = '';

function address() {
  const state = new URLSearchParams();
  panes.forEach((pane, i) => {
    if (!pane.slide || !pane.viewer.world.getItemCount()) return;
    const n = i ? '2' : '', {x, y, pixel} = pane.place();
    state.append(`s${n}`, pane.slide.name);
    state.append(`at${n}`, [x.toFixed(1), y.toFixed(1), pixel.toPrecision(6)].join());
    for (const {key, opacity, range} of pane.layers.filter(isUsed)) {
      const limits = (range || []).some(Number.isFinite) ? range.map(it => Number.isFinite(it) ? it : '').join('_') : '';
      state.append(`l${n}`, `${Math.round(opacity * 100)}|${limits}|${key}`);
    }
    if (pane.selected) state.append(`p${n}`, `${pane.selected.grid}.${pane.selected.row}`);
  });
  return `#${state}`;
}

function writeLater() {
  if (writing) return;
  writing = setTimeout(() => {
    writing = 0;
    const now = address();
    if (now !== written && now !== '#') { written = now; history.replaceState(null, '', now); }
  }, WRITE_MS);
}

const view = text => {
  const [x, y, pixel] = (text || '').split(',').map(Number);
  return [x, y, pixel].every(Number.isFinite) && pixel > 0 ? {x, y, pixel} : null;
};

const layersOf = texts => texts.map(text => {
  const [opacity, limits, ...key] = text.split('|');
  const range = limits ? limits.split('_').map((it, i) => it === '' ? [-Infinity, Infinity][i] : Number(it)) : null;
  return {key: key.join('|'), opacity: Math.min(1, Math.max(0, Number(opacity) / 100 || 0)), range};
});

async function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  const name = state.get('s');
  const first = all.slides.find(slide => slide.state === 'complete') || all.slides[0];
  const known = numbers.has(name);
  await open(known ? name : first.name, known ? view(state.get('at')) : null, known ? layersOf(state.getAll('l')) : null, panes[0]);
  if (name && !known) say(`There is no slide ${name}; this is ${first.name}.`);
  await choose(panes[0], known ? state.get('p') : null);
  const second = state.get('s2');
  if (!second) await compare(false);
  else if (panes.length === 2) await open(second, view(state.get('at2')), layersOf(state.getAll('l2')), panes[1]);
  else await compare(true, second, view(state.get('at2')), layersOf(state.getAll('l2')));
  if (!panes[1]) return;
  await choose(panes[1], state.get('p2'));
  // The first picture became narrower when the second came.
  for (const [pane, at] of [[panes[0], 'at'], [panes[1], 'at2']]) if (view(state.get(at))) pane.go(view(state.get(at)));
  relate();
}

async function choose(pane, text) {
  const [grid, row] = (text || '').split('.').map(Number);
  const found = pane.slide?.grids[grid];
  if (text && found && row >= 0 && row < found.count) await pane.select({grid, row});
}

window.addEventListener('hashchange', () => { if (location.hash !== written) restore(); });

// Keys and buttons

function toggle(button, element) {
  button.addEventListener('click', () => {
    const hide = !element.hidden;
    element.hidden = hide;
    button.setAttribute('aria-expanded', !hide);
  });
}
toggle($('#toggle-list'), $('#list'));
toggle($('#toggle-side'), $('#side'));
$('#compare').addEventListener('click', () => compare(panes.length < 2));
$('#sync').addEventListener('click', () => {
  const on = $('#sync').getAttribute('aria-pressed') !== 'true';
  $('#sync').setAttribute('aria-pressed', on);
  if (on) relate();
});
$('#help').addEventListener('click', () => $('#keys').showModal());

document.addEventListener('keydown', event => {
  if (event.defaultPrevented || $('#keys').open) return;
  const isTyping = event.target.matches('input:not([type=checkbox]):not([type=radio]):not([type=range]), select, textarea');
  if (event.key === 'Escape' && table.isOpen && !(event.target === $('#search') && event.target.value)) { table.toggle(); return; }
  const onMap = !$('#map').hidden && map?.patches;
  const labelling = () => labels && (!$('#label').hidden || onMap) && labels.pageKey(event, onMap || undefined);
  const isUndo = (event.ctrlKey || event.metaKey) && event.key === 'z';
  const undoing = () => isUndo && !$('#draw').hidden && drawings.get(active)?.undo();
  const used = !isTyping && (table.isOpen ? slides.key(event) : labelling() || undoing());
  if (used) { event.preventDefault(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping) return;
  if (event.key === 't') table.toggle();
  else if (event.key === 'm') slides.mark(slides.all[numbers.get(document.activeElement.closest('[data-slide]')?.dataset.slide ?? slides.current)]);
  else if (event.key === '/') { $('#list').hidden = false; $('#search').focus(); }
  else if (event.key === '?') $('#keys').showModal();
  else if (table.isOpen) return;
  else if (event.key === 'n') slides.move(1);
  else if (event.key === 'p') slides.move(-1);
  else if (event.key === 'c') compare(panes.length < 2);
  else if (event.key === 'l') { active.hidden = !active.hidden; active.draw(); say(active.hidden ? 'Layers are hidden.' : ''); }
  else return;
  event.preventDefault();
});
window.addEventListener('beforeunload', event => {
  if (labels?.waiting.length || [...drawings.values()].some(it => it.unsaved)) event.preventDefault();
});

if (matchMedia('(max-width: 700px)').matches) {
  $('#list').hidden = true;
  $('#toggle-list').setAttribute('aria-expanded', false);
}
active = leader = addPane();
await restore();
slides.loadLabelled().catch(error => say(error.message));
if (all.sources.length) get('metrics').then(metrics => slides.addMetrics(metrics)).catch(error => say(error.message));
window.histopipe = {panes, open, compare, labels, slides};  // for tests, and for users at the console
