"use strict";
// Pictures are stored as text in inert elements, so that they are decoded only when they become visible.
const source = (id) => document.getElementById(id).textContent.trim();
const show = (image) => {
  if (!image.src) image.src = source(image.dataset.from);
};
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) {
      show(entry.target);
      watcher.unobserve(entry.target);
    }
  }
}, { rootMargin: "300px" });
const watch = (root) => root.querySelectorAll("img[data-from]").forEach((image) => watcher.observe(image));

function details(row) {
  const made = document.createElement("tr");
  const cell = made.insertCell();
  cell.colSpan = row.cells.length;
  const pictures = document.createElement("div");
  pictures.className = "pictures";
  for (const id of row.dataset.pictures.split(" ")) {
    const figure = document.createElement("figure");
    const image = document.createElement("img");
    const caption = document.createElement("figcaption");
    const about = document.getElementById(id).dataset;
    caption.textContent = about.caption;
    figure.style.width = `${about.width}px`;
    image.alt = caption.textContent;
    image.dataset.from = id;
    figure.append(image, caption);
    pictures.append(figure);
  }
  cell.append(pictures);
  return made;
}

function toggle(row, open) {
  const button = row.querySelector("button.open");
  if (!button || (row.more !== undefined && row.more.isConnected) === open) return;
  if (open) {
    row.more = row.more || details(row);
    row.after(row.more);
    watch(row.more);
  } else {
    row.more.remove();
  }
  button.setAttribute("aria-expanded", String(open));
}

function value(row, column) {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
}

function compare(a, b) {
  const numbers = typeof a === "number" && typeof b === "number";
  return numbers ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
}

function sortBy(table, header, rows) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const column = header.cellIndex;
  const keyed = rows.map((row) => [value(row, column), row]);
  // Unknown values come last in both sort directions.
  const known = (key) => key !== "" && !Number.isNaN(key);
  keyed.sort(([a], [b]) => {
    if (known(a) !== known(b)) return known(a) ? -1 : 1;
    return descending ? compare(b, a) : compare(a, b);
  });
  const body = table.tBodies[0];
  for (const [, row] of keyed) {
    body.append(row);
    if (row.more !== undefined && row.getAttribute("hidden") === null && row.more.isConnected) body.append(row.more);
  }
}

for (const table of document.querySelectorAll("table.sortable")) {
  const rows = Array.from(table.tBodies[0].rows);
  for (const header of table.tHead.rows[0].cells) {
    const button = header.querySelector("button");
    if (button) button.addEventListener("click", () => sortBy(table, header, rows));
  }
  for (const row of rows) {
    const button = row.querySelector("button.open");
    if (button) button.addEventListener("click", () => toggle(row, button.getAttribute("aria-expanded") !== "true"));
  }
  const tools = table.closest(".sorting").querySelector(".tools");
  if (!tools) continue;  // few rows
  const search = tools.querySelector("input");
  const count = tools.querySelector("output");
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const fits = words.every((word) => texts.get(row).includes(word));
      row.hidden = !fits;
      if (!fits) toggle(row, false);
      shown += Number(fits);
    }
    count.textContent = `${shown} of ${rows.length}`;
  };
  search.addEventListener("input", filter);
  filter();
  const all = tools.querySelector("button");
  if (all) {
    all.addEventListener("click", () => {
      const open = all.getAttribute("aria-pressed") !== "true";
      all.setAttribute("aria-pressed", String(open));
      for (const row of rows) if (!row.hidden) toggle(row, open);
    });
  }
}
watch(document);
addEventListener("beforeprint", () => {
  document.querySelectorAll("img[data-from]").forEach(show);
  document.querySelectorAll("details").forEach((it) => { it.open = true; });
});
