"""Pictures of patches with wrong pixels, with both outlines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import scipy  # loads its parts when they are used
from numpy.typing import NDArray

from histopipe.annotations.rules import NOT_ANNOTATED
from histopipe.predictions.patch_values import stored_patch
from histopipe.predictions.prediction_tables import PixelErrors
from histopipe.reports.html_page import Block, Picture
from histopipe.runs.run import Run
from histopipe.store.store import Store

_SIDE = 224
"""Shortest side of a picture in pixels."""
_TRUE, _PREDICTED = (0, 130, 70), (235, 95, 0)
"""Colours of the annotated and of the predicted outline."""


def pixel_errors(run: Run, stores: Sequence[Store]) -> Iterator[Block]:
    """Yield a gallery of the patches of a run with the most wrong pixels; nothing of other tasks, or without stores."""
    errors = PixelErrors.read(run.folder)
    if errors is None:
        return
    pictures = []
    for number, (slide, (x, y)) in enumerate(zip(errors.slides, errors.corners, strict=True)):
        patch = stored_patch(stores, str(slide), int(x), int(y))
        if patch is not None:
            true, predicted = errors.true[number], errors.predicted[number]
            annotated = true != NOT_ANNOTATED
            wrong = float((true != predicted)[annotated].mean())
            if not wrong:
                continue
            caption = f"{slide}, x {x}, y {y}: {wrong:.0%} of the annotated pixels wrong"
            pixels = with_outlines(patch, true, predicted)
            pictures.append(Picture.of(f"pixels-{number}", caption, pixels))
    if pictures:
        yield Block(
            "text",
            "Green: annotated outlines. Orange: predicted outlines. Pale areas are not annotated, and have no errors.",
            tone="soft",
        )
        yield Block("gallery", pictures, "Patches with the most wrong pixels")


def with_outlines(
    patch: NDArray[np.uint8], true: NDArray[np.uint8], predicted: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return an enlarged (H, W, 3) patch with the outlines of its (H, W) annotated and predicted classes."""
    factor = -(-_SIDE // len(patch))
    pixels, annotated, best = (
        values.repeat(factor, axis=0).repeat(factor, axis=1) for values in (patch, true, predicted)
    )
    pixels = pixels.copy()
    blank = annotated == NOT_ANNOTATED
    pixels[blank] = 255 - (255 - pixels[blank].astype(int)) * 2 // 5
    near = scipy.ndimage.binary_dilation(
        blank, iterations=3
    )  # the edge of the annotated area is no outline
    # The predicted outline is thinner, so that both are visible where they are the same.
    for classes, colour, width in ((annotated, _TRUE, 2), (best, _PREDICTED, 1)):
        edge = np.zeros(classes.shape, np.bool_)
        for step in range(1, width + 1):
            edge[:, step:] |= classes[:, step:] != classes[:, :-step]
            edge[step:] |= classes[step:] != classes[:-step]
        pixels[edge & ~near] = colour
    return pixels
