// Colours of layers, and rasters with one pixel per patch.

const VIRIDIS = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141],
  [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37],
];
// Okabe and Ito's colours, which colour-blind people can distinguish.
const CLASSES = ['#e69f00', '#56b4e9', '#009e73', '#d55e00', '#0072b2', '#cc79a7', '#f0e442', '#999999', '#882255'];
const NAMED = {
  unsure: '#6e6e6e', correct: '#009e73', wrong: '#d55e00', unreadable: '#ff0000',
  train: '#0072b2', validation: '#e69f00', test: '#cc79a7',
};
const MOST_PIXELS = 16e6;

const hex = colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));

/** Return the colour [r, g, b] of a number from 0 to 1. */
export function heat(value) {
  const at = Math.min(1, Math.max(0, value)) * (VIRIDIS.length - 1);
  const i = Math.min(VIRIDIS.length - 2, Math.floor(at));
  return VIRIDIS[i].map((from, c) => Math.round(from + (VIRIDIS[i + 1][c] - from) * (at - i)));
}

/** Return the colour of a class as #rrggbb. */
export function classColour(name, number) {
  if (Object.hasOwn(NAMED, name)) return NAMED[name];
  if (number < CLASSES.length) return CLASSES[number];
  const hue = (number * 137.5) % 360;  // the golden angle: neighbours differ most
  const part = n => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (0.5 - 0.4 * Math.max(-1, Math.min(k - 3, 9 - k, 1)))).toString(16).padStart(2, '0');
  };
  return `#${part(0)}${part(8)}${part(4)}`;
}

/** Find the lattice of a grid's patches, so that one pixel of a raster is one patch, or a part of it. */
export function latticeOf(grid) {
  const {x, y, size, stride} = grid;
  const count = x.length;
  let left = Infinity, top = Infinity, right = -Infinity, bottom = -Infinity;
  for (let i = 0; i < count; i++) {
    left = Math.min(left, x[i]); right = Math.max(right, x[i]);
    top = Math.min(top, y[i]); bottom = Math.max(bottom, y[i]);
  }
  const regular = step => {
    for (let i = 0; i < count; i++) {
      const u = (x[i] - left) / step, v = (y[i] - top) / step;
      if (Math.abs(u - Math.round(u)) > 0.1 || Math.abs(v - Math.round(v)) > 0.1) return false;
    }
    return true;
  };
  let step = regular(stride) ? stride : size / 4;
  const span = Math.max(1, Math.round(size / step));
  const area = (right - left + size) * (bottom - top + size);
  if (area / (step * step) > MOST_PIXELS) step = Math.sqrt(area / MOST_PIXELS);
  const columns = Math.round((right - left) / step) + span;
  const rows = Math.round((bottom - top) / step) + span;
  return {left, top, step, span, columns, rows};
}

/** Return the mean value of the patches that cover each pixel of a grid's raster; for classes, the last one. */
function rasterValues(grid, values, shown, classes) {
  const {left, top, step, span, columns, rows} = grid.lattice;
  const sums = new Float32Array(columns * rows).fill(NaN);
  const counts = span > 1 && !classes ? new Uint16Array(columns * rows) : null;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value !== value || !shown[i]) continue;
    const column = Math.round((grid.x[i] - left) / step), row = Math.round((grid.y[i] - top) / step);
    for (let v = row; v < Math.min(rows, row + span); v++) {
      for (let u = column; u < Math.min(columns, column + span); u++) {
        const at = v * columns + u;
        if (counts && counts[at]++) sums[at] += value; else sums[at] = value;
      }
    }
  }
  if (counts) for (let at = 0; at < sums.length; at++) if (counts[at] > 1) sums[at] /= counts[at];
  return sums;
}

/** Paint a layer into a canvas with one pixel per patch. `shown` is 0 for hidden patches; `range` hides other values. */
export function paint(layer, grid, shown, range) {
  const classes = layer.classes.length > 0;
  const {columns, rows} = grid.lattice;
  const visible = new Uint8Array(layer.values.length);
  for (let i = 0; i < visible.length; i++) {
    const value = layer.values[i];
    visible[i] = shown[i] && (classes || (value >= range[0] && value <= range[1])) ? 1 : 0;
  }
  const values = rasterValues(grid, layer.values, visible, classes);
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  const table = classes
    ? layer.classes.map((name, number) => packed(hex(classColour(name, number))))
    : Array.from({length: 256}, (_, i) => packed(heat(i / 255)));
  const scale = 255 / (layer.high - layer.low || 1);
  for (let at = 0; at < values.length; at++) {
    const value = values[at];
    if (value !== value) continue;
    pixels[at] = classes ? table[value] : table[Math.min(255, Math.max(0, Math.round((value - layer.low) * scale)))];
  }
  const canvas = document.createElement('canvas');
  canvas.width = columns;
  canvas.height = rows;
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

/** Return 1 for each patch whose filtered columns are all in their ranges: `filters` is [[values, [low, high]], ...]. */
export function shownPatches(count, filters) {
  const shown = new Uint8Array(count).fill(1);
  for (const [values, [low, high]] of filters) {
    for (let i = 0; i < count; i++) if (!(values[i] >= low && values[i] <= high)) shown[i] = 0;
  }
  return shown;
}

/** Turn a mask, white on black, into a canvas of one colour with the mask as opacity. */
export async function maskCanvas(blob) {
  const bitmap = await createImageBitmap(blob);
  const canvas = document.createElement('canvas');
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  const context = canvas.getContext('2d');
  context.drawImage(bitmap, 0, 0);
  const image = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < image.data.length; i += 4) {
    const on = image.data[i] > 127;
    image.data.set(on ? [0, 158, 115, 255] : [0, 0, 0, 0], i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Return the counts of values in 40 bins from low to high. */
export function histogram(values, low, high) {
  const counts = new Array(40).fill(0);
  for (const value of values) {
    if (value !== value) continue;
    counts[Math.min(39, Math.max(0, Math.floor((value - low) / (high - low || 1) * 40)))]++;
  }
  return counts;
}
