// The table of all slides, which covers the pictures while it is open.

import {make, say} from './panel.js';
import {isMissing} from './slides.js';

const $ = selector => document.querySelector(selector);

/** Return a cell of a CSV file as RFC 4180 quotes it. */
const quoted = value => /[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;

export class Table {
  /** `slides` are filtered, sorted and paged; `focus` moves the focus to the pictures. */
  constructor(slides, focus) {
    this.slides = slides;
    this.focus = focus;
    this.view = {body: $('#table tbody'), row: slide => this.row(slide), head: () => this.showHead()};
    $('#toggle-table').addEventListener('click', () => this.toggle());
    $('#close-table').addEventListener('click', () => this.toggle());
    $('#csv').addEventListener('click', () => this.download());
  }

  get isOpen() { return !$('#table').hidden; }

  /** Open or close the table. The list, the pictures and the panel take no keys meanwhile. */
  toggle() {
    const open = !this.isOpen, {slides} = this;
    $('#table').hidden = !open;
    $('#slides').hidden = open;
    for (const id of ['#panes', '#side']) $(id).inert = open;
    for (const id of ['#toggle-side', '#compare', '#sync']) $(id).disabled = open;
    $('#toggle-table').setAttribute('aria-expanded', open);
    (open ? slides.list : this.view).body.replaceChildren();
    slides.view = open ? this.view : slides.list;
    slides.select(slides.current);
    if (!open) { this.focus(); return; }
    $('#list details').open = true;
    (slides.rowOf(slides.current) || this.view.body.firstElementChild)?.querySelector('.open').focus();
    slides.loadLabelled().catch(error => say(error.message));
  }

  /** Show the names of the columns, and by which one the slides are sorted. */
  showHead() {
    const {columns, sort, isDescending} = this.slides, head = $('#table thead tr');
    if (head.children.length !== columns.length + 1) {
      const cells = columns.map(({key, title, isNumber}) => {
        const button = make('button', {onclick: () => this.slides.sortBy(key)}, title);
        button.dataset.key = key;
        return make('th', {scope: 'col', className: isNumber ? 'number' : ''}, button);
      });
      head.replaceChildren(make('td', {}), ...cells);
    }
    columns.forEach(({key}, i) => {
      const cell = head.children[i + 1];
      if (key === sort) cell.setAttribute('aria-sort', isDescending ? 'descending' : 'ascending'); else cell.removeAttribute('aria-sort');
    });
  }

  row(slide) {
    const {slides} = this;
    const cells = slides.columns.map(column => {
      if (column.key === 'marked') return make('td', {}, this.star(slide));
      const value = column.value(slide), text = isMissing(value) ? '' : column.text?.(slide) ?? String(value);
      if (column.key !== 'slide') return make('td', {className: column.isNumber ? 'number' : ''}, text);
      const open = () => { this.toggle(); slides.open(slide.name); };
      return make('th', {scope: 'row'}, make('button', {className: 'open', title: slide.error || '', onclick: open}, text));
    });
    const row = make('tr', {className: slide.state}, make('td', {}, slides.pictures.get(slide.number)), ...cells);
    row.addEventListener('click', event => { if (!event.target.closest('button')) row.querySelector('.open').click(); });
    return row;
  }

  star(slide) {
    const marked = this.slides.isMarked(slide), waiting = this.slides.waitingMark(slide);
    return make('button', {
      className: waiting ? 'mark waiting' : 'mark', 'aria-label': `Mark ${slide.name}`, 'aria-pressed': marked,
      title: waiting ? 'not saved yet' : 'Key m', onclick: () => this.slides.mark(slide),
    }, marked ? '★' : '☆');
  }

  /** Save the slides that pass the filters as CSV, with all columns. */
  download() {
    const {columns, rows} = this.slides;
    const cell = (column, slide) => { const value = (column.cell || column.value)(slide); return isMissing(value) ? '' : quoted(String(value)); };
    const lines = [columns.map(({key}) => quoted(key)), ...rows.map(slide => columns.map(column => cell(column, slide)))];
    const url = URL.createObjectURL(new Blob([lines.map(line => `${line.join(',')}\r\n`).join('')], {type: 'text/csv'}));
    make('a', {href: url, download: 'slides.csv'}).click();
    setTimeout(() => URL.revokeObjectURL(url));
    say(`${rows.length} slides downloaded as slides.csv`);
  }
}
