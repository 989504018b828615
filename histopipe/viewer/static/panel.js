// The panel: layers with opacity and legend, the selected patch, and the most confident errors.

import {classColour, histogram} from './layers.js';
import {className, classColours, get, outlineColour} from './pane.js';

/** Create an element: `make('p', {className: 'x'}, 'text', child)`. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element && name !== 'list') element[name] = value; else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A group of choices, of which one is checked; each is {id, text, checked, choose}. */
export function choices(legend, name, items) {
  return make('fieldset', {className: 'choices'}, make('legend', {}, legend), ...items.map(({id, text, checked, choose}) => make(
    'label', {}, make('input', {type: 'radio', name, id: `${name}-${id}`, checked, onchange: choose}), ` ${text}`)));
}

const format = value => typeof value !== 'number' ? String(value)
  : Number.isInteger(value) ? value.toLocaleString('en') : value.toPrecision(4);

const swatch = (colour, text) => make('li', {}, colourBox(colour), text);

export function colourBox(colour) {
  const box = make('span', {className: 'swatch'});
  box.style.background = colour;
  return box;
}

/** Show the layers of a pane. Elements are kept while a slider moves, so that it keeps the focus. */
export class LayerPanel {
  constructor(element) { this.element = element; }

  show(pane) {
    this.pane = pane;
    const open = new Set([...this.element.querySelectorAll('details[open]')].map(it => it.dataset.group));
    this.element.replaceChildren();
    if (!pane?.slide) return;
    const groups = new Map();
    for (const layer of pane.layers) {
      if (!groups.has(layer.group)) groups.set(layer.group, []);
      groups.get(layer.group).push(layer);
    }
    const titles = {slide: 'Slide', labels: 'Labels', quality: 'Quality (ranges hide patches in all layers)', split: 'Split'};
    for (const [group, layers] of groups) {
      const details = make('details', {open: open.has(group) || group === 'slide' || layers.some(it => it.opacity) || groups.size <= 6});
      details.dataset.group = group;
      details.append(make('summary', {}, titles[group] || `Predictions: ${group}`));
      for (const layer of layers) details.append(this.layer(layer));
      this.element.append(details);
    }
    if (!pane.slide.grids.length) this.element.append(make('p', {className: 'soft'}, 'This slide has no patches: ingest it, or pass its store.'));
  }

  layer(layer) {
    const {pane} = this;
    const box = make('div', {className: 'layer'});
    const check = make('input', {type: 'checkbox', checked: layer.opacity > 0});
    check.dataset.key = layer.key;
    const opacity = make('input', {
      type: 'range', min: 5, max: 100, value: Math.round((layer.opacity || layer.last || 0.6) * 100),
      'aria-label': `Opacity of ${layer.title}`,
    });
    const detail = make('div', {className: 'detail'});
    const update = async () => {
      layer.last = opacity.value / 100;
      await pane.show(layer, check.checked ? layer.last : 0).catch(error => say(error.message));
      this.detail(layer, detail);
    };
    check.addEventListener('change', update);
    opacity.addEventListener('input', () => { if (check.checked) update(); });
    box.append(make('label', {}, check, ` ${layer.title}`), opacity, detail);
    this.detail(layer, detail);
    return box;
  }

  /** Show the legend of a visible layer: classes with counts, or colour bar, histogram and range. */
  detail(layer, element) {
    const {pane} = this;
    if (element.childElementCount && layer.opacity && layer.values) return;
    element.replaceChildren();
    if (!layer.opacity) return;
    if (layer.key === 'mask') element.append(make('ul', {className: 'legend'}, swatch('#009e73', 'tissue')));
    if (layer.key === 'outlines' && pane.outlines) {
      const features = pane.outlines.features, numbers = classColours(features);
      const one = name => features.find(it => className(it) === name);
      element.append(make('ul', {className: 'legend'}, ...[...numbers.keys()].map(
        name => swatch(outlineColour(one(name), numbers), name || 'no class'))));
      if (!features.length) element.append(make('p', {className: 'soft'}, 'No annotations of this slide yet.'));
    }
    if (!layer.values) return;
    if (layer.classes.length) {
      const counts = new Array(layer.classes.length).fill(0);
      for (const value of layer.values) if (value === value) counts[value]++;
      element.append(make('ul', {className: 'legend'}, ...layer.classes.flatMap(
        (name, i) => counts[i] ? [swatch(classColour(name, i), `${name} (${format(counts[i])})`)] : [])));
      return;
    }
    element.append(this.histogram(layer));
  }

  histogram(layer) {
    const {pane} = this;
    const counts = histogram(layer.values, layer.low, layer.high), most = Math.max(...counts, 1);
    const bars = make('div', {className: 'histogram', role: 'img', 'aria-label': `Histogram of ${layer.title}`});
    const columns = counts.map(count => {
      const bar = make('span');
      bar.style.height = `${count ? Math.max(4, 100 * count / most) : 0}%`;
      return bar;
    });
    bars.append(...columns);
    const range = layer.range.map((it, i) => Number.isFinite(it) ? it : [layer.low, layer.high][i]);
    const shown = make('output');
    const slider = (which, name) => make('input', {
      type: 'range', min: layer.low, max: layer.high, step: (layer.high - layer.low) / 200, value: range[which],
      'aria-label': `${name} of ${layer.title}`, className: name.toLowerCase(),
    });
    const low = slider(0, 'Minimum'), high = slider(1, 'Maximum');
    const write = () => {
      const [from, to] = layer.range;
      const inside = layer.values.reduce((sum, it) => sum + (it >= from && it <= to), 0);
      shown.textContent = `${format(Number(low.value))} to ${format(Number(high.value))}: ${format(inside)} patches`;
      columns.forEach((bar, i) => {
        const at = layer.low + (i + 0.5) / counts.length * (layer.high - layer.low);
        bar.classList.toggle('out', at < from || at > to);
      });
    };
    const change = () => {
      // The ends of the sliders mean no limit: values may be outside of the colour bar.
      layer.range = [
        Number(low.value) <= layer.low ? -Infinity : Number(low.value),
        Number(high.value) >= layer.high ? Infinity : Number(high.value),
      ];
      pane.repaint();
      pane.dispatchEvent(new Event('layers'));
      write();
    };
    low.addEventListener('input', change);
    high.addEventListener('input', change);
    write();
    const ends = make('div', {className: 'ends'}, make('span', {}, format(layer.low)), make('span', {}, format(layer.high)));
    return make('div', {}, bars, make('div', {className: 'colourbar'}), ends, low, high, shown);
  }
}

/** Show the selected patch: picture, index row, values, and similar patches. */
export class PatchPanel {
  constructor(element, jump) { this.element = element; this.jump = jump; }

  async show(pane) {
    const selected = pane?.selected, showing = this.showing = Symbol('patch');
    if (!selected) {
      this.element.replaceChildren(make('p', {className: 'soft'}, 'Click on a patch, or use the arrow keys.'));
      return;
    }
    const at = `${selected.grid}/${selected.row}`;
    const facts = await get(`${pane.base}/patch/${at}`);
    if (showing !== this.showing) return;
    const name = `Patch ${facts.row} of ${pane.slide.name}`;
    const rows = [['x, y', `${facts.x}, ${facts.y}`], ['side', `${format(facts.size)} level-0 px`]];
    if (facts.checksum) rows.push(['checksum', facts.checksum], ['route', facts.route]);
    for (const [key, value] of Object.entries(facts.index || {})) rows.push([key, key === 'crc' ? value.toString(16).padStart(8, '0') : value ?? 'none']);
    const groups = new Map();
    for (const it of facts.values.filter(it => it.group !== 'quality')) {
      if (!groups.has(it.group)) groups.set(it.group, []);
      groups.get(it.group).push([it.title, it.value]);
    }
    const picture = make('img', {src: pictureOf(pane, facts), alt: name, className: 'patch'});
    this.element.replaceChildren(make('h3', {}, name), picture);
    for (const [group, values] of groups) this.element.append(table(group, values));
    this.element.append(table('index', rows));
    if (pane.slide.similar) this.element.append(this.similar(pane, at));
    say(`${name}: ${facts.values.map(it => `${it.title} ${format(it.value)}`).join(', ')}`);
  }

  similar(pane, at) {
    const found = make('div', {className: 'gallery'});
    const search = async all => {
      found.replaceChildren(make('p', {className: 'soft'}, 'Searching…'));
      try {
        const list = await get(`${pane.base}/similar/${at}?all=${all}`);
        const size = pane.slide.grids[0].size;
        found.replaceChildren(...list.map(it => thumb(it, size, `${it.slide}: ${it.cosine.toFixed(3)}`, this.jump)));
      } catch (error) { found.replaceChildren(make('p', {}, error.message)); }
    };
    const button = (text, all) => make('button', {onclick: () => search(all)}, text);
    return make('div', {}, make('h3', {}, 'Similar patches'), button('In this slide', 0), button('In all slides', 1), found);
  }
}

const pictureOf = (pane, {x, y, size}) => `${pane.base}/picture/${x}/${y}?size=${size}`;

function table(caption, rows) {
  return make('table', {}, make('caption', {}, caption),
    ...rows.map(([name, value]) => make('tr', {}, make('th', {scope: 'row'}, name), make('td', {}, format(value)))));
}

export function thumb(it, size, text, jump) {
  const query = size ? `?size=${size}` : '';
  const src = `slides/${numberOf(it.slide)}/picture/${it.x}/${it.y}${query}`;
  const picture = make('img', {loading: 'lazy', alt: '', src});
  return make('button', {className: 'thumb', onclick: () => jump(it)}, picture, make('span', {}, text));
}

let numberOf = () => -1;
/** Set the function that returns the number of a slide in the list. */
export const setNumbers = of => { numberOf = of; };

const PREDICTED = 'Labelled patches with a wrong prediction; the lowest probability of the true class first.';
const LABELS = 'Slides and patches whose label is contradicted by models that have not seen them; the least probable label first. Weak models contradict many right labels.';

/** Show the most confident errors of a source, or the labels to check of a cross-validation. */
export class ErrorPanel {
  constructor(element, sources, labels, jump) {
    this.element = element;
    this.jump = jump;
    const choice = make('select', {'aria-label': 'Predictions'},
      ...sources.map((it, i) => make('option', {value: `errors/${i}`}, it.name)),
      ...labels.map(it => make('option', {value: `labels/${encodeURIComponent(it)}`}, `${it}: labels to check`)));
    this.found = make('div', {className: 'gallery'});
    this.text = make('p', {className: 'soft'}, sources.length
      ? PREDICTED
      : 'Pass a run or a folder of predictions to see its errors.');
    choice.addEventListener('change', () => this.load(choice.value));
    element.append(...(sources.length ? [make('label', {}, 'Predictions ', choice)] : []), this.text, this.found);
    this.first = sources.length ? () => { this.first = null; this.load('errors/0'); } : null;
  }

  async load(source) {
    const labels = source.startsWith('labels');
    this.text.textContent = labels ? LABELS : PREDICTED;
    this.found.replaceChildren(make('p', {className: 'soft'}, 'Reading…'));
    try {
      const list = await get(source);
      this.found.replaceChildren(...list.map(it => (labels ? this.label(it) : thumb(
        it, 0, `${it.slide}: ${it.label}, predicted ${it.predicted}, p = ${it.p.toFixed(3)}`, this.jump))));
      if (!list.length) this.found.replaceChildren(make('p', {}, labels ? 'No label is improbable.' : 'No labelled patch has a wrong prediction.'));
    } catch (error) { this.found.replaceChildren(make('p', {}, error.message)); }
  }

  /** A slide or patch to check; a click opens it. */
  label(it) {
    const of = it.column && `${it.column}: `;
    const text = `${it.slide}: ${of}${it.label}, probably ${it.suggested}, p = ${(+it.p_label).toFixed(3)} and ${(+it.p_suggested).toFixed(3)}`;
    if (it.level === 'patch') return thumb({...it, x: +it.x_l0, y: +it.y_l0}, 0, text, this.jump);
    return make('button', {className: 'thumb', onclick: () => this.jump({slide: it.slide})}, make('span', {}, text));
  }
}

/** Show a short message at the top of the page; screen readers speak it. */
export function say(text) { document.querySelector('#status').textContent = text; }
