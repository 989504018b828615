// The slides with their columns, filters, order and pages: the same for the list at the left and for the table.

import {get} from './pane.js';
import {make, say} from './panel.js';

const PAGE = 100;  // elements of more slides would make each change slow
const TYPING_MS = 120;
const STEPS = {Home: 'first', PageUp: 'previous', PageDown: 'next', End: 'last'};
const SIGNS = {first: '«', previous: '‹', next: '›', last: '»'};

const $ = selector => document.querySelector(selector);
const counted = value => value.toLocaleString('en');
export const isMissing = value => value === undefined || value === null || value === '';

/** Return the names of the predicted numbers or labels of slides. */
function targets(slides) {
  const [first = {}] = Object.values(slides);
  return Object.keys(first).filter(key => typeof first[key] === 'number' && !/^(sd_|unusual)/.test(key));
}

const targetTitle = key => key.replace(/^predicted_/, 'predicted ');

/**
 * All slides. `view` shows a page of them: `body` is its element, `row` makes the element of a slide.
 *
 * A column has a key, a title, the value of a slide to sort by, and perhaps its text, its cell in a CSV file,
 * and a choice to filter by.
 */
export class Slides {
  constructor({slides, sources}, labels, open) {
    this.all = slides;
    this.sources = sources;
    this.labels = labels;
    this.open = open;
    this.numbers = new Map(slides.map((slide, i) => [slide.name, i]));
    this.metrics = {};
    this.labelled = {};
    this.marks = new Set();
    this.pictures = new Map();
    this.page = 0;
    this.sort = 'slide';
    this.reversed = false;
    for (const [i, slide] of slides.entries()) {
      slide.number = i;
      slide.words = [slide.name, slide.patient, slide.label, slide.site].join(' ').toLowerCase();
    }
    this.list = this.view = {body: $('#slides'), row: slide => this.item(slide)};
    this.columns = this.firstColumns();
    this.filters = new Map();
    this.build();
    this.showColumns();
    labels?.addEventListener('mark', ({detail: {slide, marked, saved}}) => {
      if (saved) this.marks[marked ? 'add' : 'delete'](slide);
      this.render();
    });
  }

  firstColumns() {
    const choice = slide => this.isMarked(slide) ? 'marked' : 'not marked';
    const ofPatient = {key: 'patient', title: 'Patient', value: slide => slide.patient};
    const plain = ['label', 'site', 'state'].map(key => ({
      key, title: key[0].toUpperCase() + key.slice(1), value: slide => slide[key], choice: slide => slide[key],
    }));
    const columns = [{key: 'slide', title: 'Slide', value: slide => slide.name}, ofPatient, ...plain,
      {key: 'patches', title: 'Patches', isNumber: true, value: slide => slide.patches, text: slide => counted(slide.patches)}];
    if (!this.labels) return columns;
    const canLabel = slide => slide.state === 'complete' && slide.patches > 0;
    const done = slide => canLabel(slide) ? this.labelled[slide.number] || 0 : null;
    return [
      {key: 'marked', title: 'Mark', isNumber: true, value: slide => Number(this.isMarked(slide)), choice, choices: ['marked', 'not marked']},
      ...columns,
      {key: 'labelled', title: 'Labelled', isNumber: true, value: slide => canLabel(slide) ? done(slide) / slide.patches : null,
        text: slide => `${counted(done(slide))} of ${counted(slide.patches)}`, cell: done,
        choice: slide => done(slide) ? 'labelled' : canLabel(slide) ? 'not begun' : null, choices: ['labelled', 'not begun']},
    ];
  }

  // Metrics, progress and marks

  /** Load the progress of labelling, and the marks. */
  async loadLabelled() {
    if (!this.labels) return;
    const {labelled, marked} = await get('labelled');
    this.labelled = labelled;
    this.marks = new Set(marked);
    this.update(true);
  }

  /** Show the predictions of a source that is new, or predicts again. */
  addSource(source, metrics) {
    const isOld = key => key.startsWith(`${source.name}:`);
    this.sources = [...this.sources.filter(({name}) => name !== source.name), source];
    this.columns = this.columns.filter(({key}) => !isOld(key));
    for (const [key, {select}] of this.filters) if (isOld(key)) { select.parentElement.remove(); this.filters.delete(key); }
    this.addMetrics({...this.metrics, [source.name]: metrics}, [source]);
  }

  /** Add the columns of predictions. */
  addMetrics(metrics, sources = this.sources) {
    this.metrics = metrics;
    for (const {name, classes} of sources) {
      const {slides, split} = metrics[name], rows = Object.values(slides);
      const add = (key, title, isNumber, value, choice) => this.columns.push({
        key: `${name}:${key}`, title: `${name}: ${title}`, isNumber, value, choice,
        text: isNumber ? slide => classes.length ? value(slide).toFixed(3) : value(slide).toPrecision(3) : undefined,
      });
      const predicted = slide => slides[slide.id]?.predicted, subset = slide => split[slide.id];
      if (rows.some(it => it.predicted)) add('predicted', 'predicted', false, predicted, predicted);
      for (const key of classes.length ? [...classes, 'correct'] : targets(slides)) {
        if (!rows.some(it => typeof it[key] === 'number')) continue;
        const title = key === 'correct' ? 'share correct' : classes.length ? `p ${key}` : targetTitle(key);
        add(key, title, true, slide => slides[slide.id]?.[key]);
      }
      if (Object.keys(split).length) add('split', 'split', false, subset, subset);
    }
    this.showColumns();
    this.update(true);
  }

  /** The last act on a slide's mark that is not saved. */
  waitingMark(slide) { return this.labels?.waiting.findLast(act => act.act === 'mark' && act.slide === slide.number); }

  isMarked(slide) { return this.waitingMark(slide)?.marked ?? this.marks.has(slide.number); }

  mark(slide) {
    if (!slide) return;
    if (!this.labels) { say('Marks need a journal. Start the viewer with --journal FOLDER --rater NAME.'); return; }
    const marked = !this.isMarked(slide);
    this.labels.send({act: 'mark', slide: slide.number, marked});
    say(`${slide.name}: ${marked ? 'marked' : 'no mark'}`);
  }

  // Filters, order and pages

  build() {
    let typing = 0;
    $('#search').addEventListener('input', () => { clearTimeout(typing); typing = setTimeout(() => this.update(), TYPING_MS); });
    $('#least').addEventListener('input', () => this.update());
    $('#sort').addEventListener('change', () => this.sortBy($('#sort').value));
    $('#slides').addEventListener('keydown', event => { if (this.key(event)) event.preventDefault(); });
    for (const pages of document.querySelectorAll('.pages')) {
      const [first, previous, next, last] = Object.entries(STEPS).map(([key, to]) => make(
        'button', {title: `${to} page (${key})`, 'aria-label': `${to} page`, onclick: () => this.go(to)}, SIGNS[to]));
      pages.append(first, previous, make('span', {role: 'status'}), next, last);
    }
  }

  /** Offer the columns to sort by, and those with several choices to filter by. */
  showColumns() {
    $('#sort').replaceChildren(...this.columns.map(({key, title}) => make('option', {value: key}, title)));
    if (!this.column) this.sort = 'slide';
    $('#sort').value = this.sort;
    for (const {key, title, choice, choices} of this.columns) {
      if (!choice || this.filters.has(key)) continue;
      const values = choices || [...new Set(this.all.map(choice).filter(Boolean))].sort();
      if (!values.length) continue;
      const select = make('select', {id: `filter-${key}`, onchange: () => this.update()},
        make('option', {value: ''}, 'all'), ...values.map(value => make('option', {value}, value)));
      this.filters.set(key, {select, choice});
      $('#filters').append(make('label', {}, `${title} `, select));
    }
  }

  get column() { return this.columns.find(({key}) => key === this.sort); }

  /** Whether the largest value is first: of numbers, unless the user has reversed the order. */
  get isDescending() { return Boolean(this.column.isNumber) !== this.reversed; }

  /** Sort by a column; if the slides are sorted by it already, in the other direction. */
  sortBy(key) {
    this.reversed = key === this.sort && !this.reversed;
    this.sort = $('#sort').value = key;
    this.update();
  }

  /** Filter and sort the slides. */
  update(samePage = false) {
    const {isNumber, value} = this.column, least = isNumber && $('#least').value !== '' ? Number($('#least').value) : null;
    const words = $('#search').value.toLowerCase().split(/\s+/).filter(Boolean);
    const filters = [...this.filters.values()].filter(({select}) => select.value);
    this.rows = this.all.filter(slide => words.every(word => slide.words.includes(word))
      && filters.every(({select, choice}) => choice(slide) === select.value)
      && (least === null || value(slide) >= least));
    const values = new Map(this.rows.map(slide => [slide, value(slide)])), sign = this.isDescending ? -1 : 1;
    // The sort is stable: slides with equal values stay in the order of their names.
    this.rows.sort((a, b) => {
      const u = values.get(a), v = values.get(b);
      if (isMissing(u) || isMissing(v)) return isMissing(u) - isMissing(v);
      return (u < v ? -1 : u > v ? 1 : 0) * sign;
    });
    $('#least').disabled = !isNumber;
    $('#list summary').textContent = filters.length ? `Filters (${filters.length})` : 'Filters';
    if (!samePage) this.page = 0;
    this.render();
  }

  get last() { return Math.max(0, Math.ceil(this.rows.length / PAGE) - 1); }

  go(to) {
    const page = {first: 0, previous: this.page - 1, next: this.page + 1, last: this.last}[to];
    if (page === this.page || page < 0 || page > this.last) return;
    this.page = page;
    this.render();
    this.view.body.firstElementChild?.scrollIntoView({block: 'nearest'});
  }

  /** Show the page, and keep the focus on its slide. */
  render() {
    const {body, row} = this.view, focus = document.activeElement, before = body.contains(focus) && focus.closest('[data-slide]');
    const old = this.pictures;  // pictures that stay are not loaded again
    this.pictures = new Map();
    this.page = Math.min(this.page, this.last);
    const visible = this.rows.slice(this.page * PAGE, (this.page + 1) * PAGE);
    for (const {number} of visible) {
      this.pictures.set(number, old.get(number) || make('img', {loading: 'lazy', alt: '', width: 56, height: 56, src: `slides/${number}/thumbnail`}));
    }
    body.replaceChildren(...visible.map(slide => {
      const element = row(slide);
      element.dataset.slide = slide.name;
      if (slide.name === this.current) element.querySelector('.open').setAttribute('aria-current', 'true');
      return element;
    }));
    if (before) (this.rowOf(before.dataset.slide) || body.firstElementChild)?.querySelector(focus.matches('.mark') ? '.mark' : '.open').focus();
    this.view.head?.();
    $('#count').textContent = `${this.rows.length} of ${this.all.length} slides`;
    for (const pages of document.querySelectorAll('.pages')) {
      pages.hidden = Boolean(pages.closest('#list')) && (this.view !== this.list || !this.last);
      pages.querySelector('span').textContent = `Page ${this.page + 1} of ${this.last + 1}`;
      const [first, previous, next, last] = pages.querySelectorAll('button');
      first.disabled = previous.disabled = !this.page;
      next.disabled = last.disabled = this.page === this.last;
    }
  }

  rowOf(name) { return [...this.view.body.children].find(({dataset}) => dataset.slide === name); }

  /** Show which slide is open, on its page. */
  select(name) {
    const at = this.rows.findIndex(slide => slide.name === name);
    if (name !== this.current && at >= 0) this.page = Math.floor(at / PAGE);
    this.current = name;
    this.render();
    this.rowOf(name)?.scrollIntoView({block: 'nearest'});
  }

  /** Open the next slide, or the one before. */
  move(step) {
    const next = this.rows[this.rows.findIndex(({name}) => name === this.current) + step];
    if (next) this.open(next.name);
  }

  /** Handle a key of the list or the table; return whether it was used. */
  key({key, ctrlKey, metaKey, altKey}) {
    if (ctrlKey || metaKey || altKey) return false;
    const step = {ArrowDown: 1, ArrowUp: -1}[key], {body} = this.view;
    if (!step && !STEPS[key]) return false;
    const at = [...body.children].findIndex(row => row.contains(document.activeElement));
    const next = step && body.children[at + step];
    if (step && (next || at < 0)) { (next || body.children[0])?.querySelector('.open').focus(); return true; }
    const before = this.page, to = STEPS[key] || (step > 0 ? 'next' : 'previous');
    this.go(to);
    const toEnd = this.page === before ? /next|last/.test(to) : step < 0;
    body[toEnd ? 'lastElementChild' : 'firstElementChild']?.querySelector('.open').focus();
    return true;
  }

  // The list

  /** Make the element of a slide in the list. */
  item(slide) {
    const words = [slide.label, slide.state === 'complete' ? `${counted(slide.patches)} patches` : slide.state, slide.patient !== slide.name ? slide.patient : null];
    for (const {name, classes} of this.sources) {
      const values = this.metrics[name]?.slides[slide.id];
      if (!values) continue;
      const numbers = targets({slide: values}).map(key => ` ${targetTitle(key)} ${Number(values[key]).toPrecision(3)}`).join(',');
      const p = !classes.length ? numbers : classes.length === 2 ? ` p ${classes[1]} ${values[classes[1]]?.toFixed(2) ?? ''}` : ` ${values.predicted ?? ''}`;
      const subset = this.metrics[name].split[slide.id];
      words.push(`${name}:${p}${subset ? `, ${subset === 'several' ? 'several sides' : subset}` : ''}`);
    }
    const mark = this.isMarked(slide) ? [make('span', {role: 'img', 'aria-label': 'marked'}, '★'), ' '] : [];
    const button = make('button', {className: 'open', title: slide.error || slide.name, onclick: () => this.open(slide.name)}, this.pictures.get(slide.number),
      make('span', {}, make('b', {}, ...mark, slide.name), make('small', {}, words.filter(Boolean).join(', '))));
    button.dataset.slide = slide.name;
    return make('li', {className: slide.state}, button);
  }
}
