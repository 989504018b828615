"""The picture that a heatmap lies on: the slide itself where it is at hand, else the thumbnail that a store has kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.geometry import Mpp
from histopipe.inference.predictions_folder import PredictionFolder
from histopipe.slides.slide import Slide
from histopipe.slides.thumbnail import ASSUMED_MPP, read_thumbnail
from histopipe.store.picture import decode_picture
from histopipe.store.store import Store

_SIDE = 1600
"""Longer side of a picture that is read from a slide, about."""


@dataclass(frozen=True, slots=True)
class Backgrounds:
    """Where pictures of slides may be.

    Attributes:
        files: slides by id.
        stores: with their thumbnails.
        predictions: a folder of predictions, which has those of its slides.
    """

    files: Mapping[str, Path]
    stores: Sequence[Store]
    predictions: PredictionFolder | None = None

    def of(self, slide: str) -> NDArray[np.uint8] | None:
        """(H, W, 3) uint8 RGB of a slide's scanned area; None where there is no picture of it.

        Raises:
            SlideError, DamagedStore: what is there cannot be read.
        """
        if slide in self.files:
            return _read(self.files[slide])
        thumbnail = self._kept(slide)
        return None if thumbnail is None else decode_picture(thumbnail, f"thumbnail of {slide}")

    def _kept(self, slide: str) -> bytes | None:
        if self.predictions is not None:
            path = self.predictions.thumbnail(slide)
            if path.exists():
                return path.read_bytes()
        for store in self.stores:
            for number, record in store.complete.items():
                if record.id == slide.partition("@")[0]:
                    return store.thumbnail(number)
        return None


def _read(path: Path) -> NDArray[np.uint8]:
    with Slide(path) as slide:
        bounds = slide.info.bounds.size
        # In units of the assumed scale: only its ratio to level 0 counts here.
        wanted = Mpp(max(1.0, max(bounds.width, bounds.height) / _SIDE) * ASSUMED_MPP)
        return read_thumbnail(slide, None, at=wanted).pixels
