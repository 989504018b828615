// What is drawn of a tissue mask: outlines that add tissue, and outlines that cut out. They count in their order.

import {className, featurePath, ringsOf} from './pane.js';

const FILL = 0.25;  // opacity

/** The classes of outlines, as QuPath names them. */
export const TISSUE = {name: 'Tissue', color: [0, 160, 90]}, CUT = {name: 'Ignore*', color: [200, 60, 60]};

const isCut = feature => className(feature) === CUT.name;
const isTissue = feature => className(feature).toLowerCase() === 'tissue';

/** Return what an outline does. */
export const nameOfPart = feature => isCut(feature) ? 'cut out' : isTissue(feature) ? 'tissue' : `${className(feature) || 'no class'}: not tissue`;

/** Fill the tissue on another canvas and copy it, so that a cut removes only tissue that was before. */
export function fillTissue(context, canvas, {features, origin}) {
  const {width, height} = context.canvas, area = canvas.getContext('2d');
  Object.assign(canvas, {width, height});
  area.setTransform(context.getTransform());
  area.fillStyle = `rgb(${TISSUE.color.join(' ')})`;
  for (const feature of features.filter(it => isCut(it) || isTissue(it))) {
    const path = featurePath(feature, origin);
    area.globalCompositeOperation = isCut(feature) ? 'destination-out' : 'source-over';
    // A line that crosses itself encloses all of its loops, as on the server.
    if (path) area.fill(path, ringsOf(feature).length === 1 ? 'nonzero' : 'evenodd');
  }
  context.save();
  context.resetTransform();
  context.globalAlpha = FILL;
  context.drawImage(canvas, 0, 0);
  context.restore();
}
