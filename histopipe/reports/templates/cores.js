"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const by = id => document.getElementById(id);
const svg = document.querySelector("svg"), image = document.querySelector("#slide img");
const SVG = "http://www.w3.org/2000/svg";
const stateOf = title => Object.keys(data.states).find(state => data.states[state][0] === title);
let cores = data.features.map(({geometry, properties: {name, classification, why, row, column}}) =>
  ({name, state: stateOf(classification.name), why, place: [row, column], geometry}));
let chosen = null, saved = true;
const past = [];

// Rings of a core in pixels of the thumbnail.
const rings = core => (core.geometry.type === "Polygon" ? [core.geometry.coordinates] : core.geometry.coordinates).flat();
const points = core => rings(core).flat();
function box(core) {
  const all = points(core), x = all.map(p => p[0]), y = all.map(p => p[1]);
  const [left, right, top, bottom] = [Math.min(...x), Math.max(...x), Math.min(...y), Math.max(...y)];
  return {x: (left + right) / 2, y: (top + bottom) / 2, radius: (right - left) / 2};
}
function moved(core, dx, dy) {
  const shift = value => typeof value[0] === "number" ? [value[0] + dx, value[1] + dy] : value.map(shift);
  core.geometry = {type: core.geometry.type, coordinates: shift(core.geometry.coordinates)};
}
function remember() {
  past.push(JSON.stringify(cores));
  saved = false;
  by("saved").textContent = "Not saved.";
}

function draw() {
  svg.setAttribute("viewBox", `0 0 ${image.naturalWidth * data.side} ${image.naturalHeight * data.side}`);
  svg.replaceChildren();
  cores.forEach((core, number) => {
    const group = document.createElementNS(SVG, "g"), path = document.createElementNS(SVG, "path");
    group.setAttribute("class", `${core.state} ${number === chosen ? "chosen" : ""}`);
    if (!core.name && core.state === "missing") group.style.display = "none";
    path.setAttribute("d", rings(core).map(ring => "M" + ring.map(p => p.join(" ")).join("L") + "Z").join(""));
    path.setAttribute("stroke", `rgb(${data.states[core.state][1]})`);
    const at = box(core), text = document.createElementNS(SVG, "text");
    text.setAttribute("x", at.x);
    text.setAttribute("y", at.y);
    text.setAttribute("font-size", at.radius * Math.min(0.6, 2.6 / Math.max(3, core.name.length)));
    text.textContent = core.name || "?";
    group.append(path, text);
    group.addEventListener("pointerdown", event => drag(event, number));
    svg.append(group);
  });
  const counts = {};
  for (const core of cores) counts[core.state] = (counts[core.state] || 0) + 1;
  by("counts").textContent = Object.keys(data.states).map(s => `${counts[s] || 0} ${s === "core" ? "named" : s}`).join(" · ");
  const core = cores[chosen];
  by("name").value = core ? core.name : "";
  by("why").textContent = core ? core.why : "";
  for (const button of by("states").children) {
    button.disabled = !core;
    button.setAttribute("aria-pressed", String(Boolean(core) && core.state === button.dataset.state));
    button.style.fontWeight = core && core.state === button.dataset.state ? "700" : "";
  }
  by("doubts").replaceChildren(...cores.flatMap((each, number) => {
    if (each.state !== "uncertain") return [];
    const item = document.createElement("li"), button = document.createElement("button");
    button.textContent = `${each.name || "no name"}: ${each.why}`;
    button.addEventListener("click", () => { choose(number); svg.children[number].scrollIntoView({block: "center", inline: "center"}); });
    item.append(button);
    return [item];
  }));
}
function choose(number) {
  chosen = number;
  draw();
}
function place(event) {
  const frame = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  return [(event.clientX - frame.left) / frame.width * view.width, (event.clientY - frame.top) / frame.height * view.height];
}
function drag(event, number) {
  event.preventDefault();
  choose(number);
  let last = place(event), started = false;
  const move = next => {
    if (!started) remember();
    started = true;
    const now = place(next);
    moved(cores[number], now[0] - last[0], now[1] - last[1]);
    last = now;
    draw();
  };
  const end = () => {
    window.removeEventListener("pointermove", move);
    window.removeEventListener("pointerup", end);
  };
  window.addEventListener("pointermove", move);
  window.addEventListener("pointerup", end);
}
function change(values) {
  if (chosen === null) return;
  remember();
  Object.assign(cores[chosen], values);
  draw();
}
function remove() {
  if (chosen === null) return;
  remember();
  cores.splice(chosen, 1);
  choose(null);
}
function undo() {
  if (past.length) cores = JSON.parse(past.pop());
  choose(null);
}

for (const state of Object.keys(data.states)) {
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.state = state;
  button.textContent = data.states[state][0];
  button.addEventListener("click", () => change({state, why: ""}));
  by("states").append(button);
}
by("form").addEventListener("submit", event => {
  event.preventDefault();
  change({name: by("name").value.trim(), state: "core", why: ""});
});
by("remove").addEventListener("click", remove);
by("undo").addEventListener("click", undo);
by("confirm").addEventListener("click", () => {
  remember();
  for (const core of cores) if (core.state === "uncertain" && core.name) Object.assign(core, {state: "core", why: ""});
  by("reason").textContent = "";
  draw();
});
svg.addEventListener("dblclick", event => {
  const [x, y] = place(event), radius = cores.length ? box(cores[0]).radius : 0.02 * svg.viewBox.baseVal.width;
  const ring = Array.from({length: 49}, (_, n) => [x + radius * Math.cos(n * Math.PI / 24), y + radius * Math.sin(n * Math.PI / 24)]);
  remember();
  cores.push({name: "", state: "uncertain", why: "added", place: [-1, -1], geometry: {type: "Polygon", coordinates: [ring]}});
  choose(cores.length - 1);
  by("name").focus();
});
document.addEventListener("keydown", event => {
  if (event.target.matches("input, select")) return;
  const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
  if (event.key === "Delete" || event.key === "Backspace") remove();
  else if (event.key === "z" && (event.ctrlKey || event.metaKey)) undo();
  else if (step && chosen !== null) {
    event.preventDefault();
    remember();
    const by_l0 = box(cores[chosen]).radius / 10;
    moved(cores[chosen], step[0] * by_l0, step[1] * by_l0);
    draw();
  }
});
by("zoom").addEventListener("input", () => { by("slide").style.width = `${100 * by("zoom").value}%`; });

// The map, turned and moved over the rows and columns of the cores.
const turned = map => map[0].map((_, column) => map.map(row => row[column]).reverse());
const TURNS = ["as written", "turned by 90°", "turned by 180°", "turned by 270°", "mirrored", "mirrored, by 90°", "mirrored, by 180°", "mirrored, by 270°"];
let offset = [0, 0];
function rename() {
  const turn = by("turn").selectedIndex;
  let map = turn > 3 ? data.map.map(row => [...row].reverse()) : data.map;
  for (let n = 0; n < turn % 4; n++) map = turned(map);
  remember();
  for (const core of cores) {
    if (core.place[0] < 0) continue;
    const name = (map[core.place[0] + offset[0]] || [])[core.place[1] + offset[1]] || "";
    Object.assign(core, {name, why: name ? "the map was turned or moved" : "the map has no core here"});
    if (core.state === "core") core.state = "uncertain";
  }
  choose(null);
}
if (data.map.length) {
  for (const title of TURNS) by("turn").append(new Option(title));
  by("turn").addEventListener("change", () => { offset = [0, 0]; rename(); });
  for (const button of document.querySelectorAll("[data-by]")) button.addEventListener("click", () => {
    const [down, right] = button.dataset.by.split(",").map(Number);
    offset = [offset[0] - down, offset[1] - right];
    rename();
  });
} else by("turning").remove();

by("save").addEventListener("click", () => {
  const names = cores.filter(core => core.name || core.state === "core").map(core => core.name);
  const twice = names.filter((name, at) => !name || name.includes("/") || names.indexOf(name) !== at);
  if (twice.length) {
    by("saved").textContent = `Not saved: give each core one name, without /: ${twice.map(name => name || "no name").join(", ")}`;
    return;
  }
  const features = cores.filter(core => core.name || core.state !== "missing").map(core => ({
    type: "Feature",
    geometry: core.geometry,
    properties: {
      objectType: "annotation", name: core.name, classification: {name: data.states[core.state][0], color: data.states[core.state][1]},
      why: core.why, row: core.place[0], column: core.place[1],
    },
  }));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({type: "FeatureCollection", features, "histopipe-cases": data.cases})], {type: "application/geo+json"}));
  link.download = `${data.slide.split("/").pop()}.geojson`;
  link.click();
  saved = true;
  by("saved").textContent = `Saved as ${link.download} among your downloads: move it into the folder of this page.`;
});
window.addEventListener("beforeunload", event => { if (!saved) event.preventDefault(); });
const ready = () => {
  by("slide").style.aspectRatio = `${image.naturalWidth} / ${image.naturalHeight}`;
  draw();
};
if (image.complete) ready();
else image.addEventListener("load", ready);
