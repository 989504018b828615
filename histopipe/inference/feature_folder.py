"""Write the features of slides, from stores or from slide files, one HDF5 file per slide."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from histopipe.features import StoredType
from histopipe.features.feature_file import (
    SLIDES,
    FeatureHeader,
    feature_path,
    writing,
)
from histopipe.inference.slide_run import Network, Results
from histopipe.predictions.predictions_folder import PredictedSlide
from histopipe.slides.scale import MAGNIFICATION_MPP
from histopipe.splits.slide_table import Exclusion, SlideEntry, read_slide_table, write_slide_table
from histopipe.store.record import SlideRecord

_USUAL_MAGNIFICATIONS = (80, 60, 40, 20, 10, 5)
_MAGNIFICATION_TOLERANCE = 0.15


class SlideToEmbed(Protocol):
    """A slide of a store, or a tiled slide file."""

    @property
    def id(self) -> str:
        """Slide id."""

    @property
    def record(self) -> SlideRecord:
        """Size, scale, label and patient of the slide."""

    @property
    def origin(self) -> Mapping[str, Any]:
        """Attributes that identify the patches."""

    @property
    def rows(self) -> int:
        """Number of patches, with those that cannot be read."""

    @property
    def patches(self) -> int:
        """Number of patches that have been read."""

    @property
    def skipped(self) -> int:
        """Number of patches that could not be read."""

    @property
    def patch_size(self) -> int:
        """Side of the patches in pixels."""

    @property
    def overlap(self) -> int:
        """Overlap of neighbouring patches in pixels."""

    def predicted(self) -> PredictedSlide:
        """Describe the slide after its patches have been computed. Raise SlideUnreadable if the file has changed."""


@dataclass(frozen=True, slots=True)
class FeatureFolder:
    """A folder of feature files of one encoder."""

    encoder: Network
    path: Path
    dtype: StoredType

    def write(self, slide: SlideToEmbed, results: Iterator[Results]) -> tuple[int, int]:
        """Write the feature file of a slide. Return the numbers of computed and skipped patches."""
        path = feature_path(self.path, slide.id)
        with writing(path, slide.rows, self.encoder.dimension, self.dtype) as writer:
            for features, corners in results:
                writer.append(features, corners)
            described = slide.predicted()
            identity = self.encoder.identity
            attributes = {  # values of None are not written
                "slide": slide.id,
                "label": slide.record.label,
                "patient": slide.record.patient,
                "site": slide.record.site,
                **asdict(slide.record.hashes),
                **slide.origin,
                "encoder": identity["encoder"],
                "encoder_sha256": identity.get("sha256"),
                "geometry": json.dumps(described.geometry),
                "skipped": slide.skipped,
            }
            writer.finish(attributes, _coords_attributes(slide))
        return slide.patches, slide.skipped


def record_slides(folder: Path, slides: Iterable[SlideEntry], failed: Collection[str]) -> None:
    """Write which slides were found, those without features with the reason, and keep slides of earlier commands."""
    path = folder / SLIDES
    recorded = {entry.slide: entry for entry in read_slide_table(path)}
    for entry in slides:
        slide = (
            replace(entry, reason=Exclusion.EMBEDDING_FAILED) if entry.slide in failed else entry
        )
        before = recorded.get(slide.slide)
        if slide.reason and before is not None and before.store != slide.store:
            slide = replace(slide, slide=f"{slide.slide}@{slide.store}")  # of another store
        recorded[slide.slide] = slide
    write_slide_table(path, recorded.values())


def described(
    header: FeatureHeader, slide: str, patient: str, label: str | None
) -> PredictedSlide | None:
    """Return the slide of a feature file; None if the file does not record its geometry, like those of other tools."""
    try:
        geometry = json.loads(str(header.facts["geometry"]))
        return PredictedSlide(
            slide=slide, patient=patient, label=label, **geometry, patches=header.rows,
            source=str(header.facts.get("source") or header.facts.get("patches_crc")),
            skipped=int(header.facts.get("skipped", 0)),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None


def _coords_attributes(slide: SlideToEmbed) -> dict[str, Any]:
    """Return the attributes of the coordinates, with the names that TRIDENT and CLAM use.

    CLAM reads patches at `patch_level` without resampling, so it is written only if they were not resampled.
    """
    record = slide.record
    attributes: dict[str, Any] = {
        "name": record.id,
        "patch_size": slide.patch_size,
        "overlap": slide.overlap,
        "level0_width": record.width,
        "level0_height": record.height,
        "savetodir": "",
    }
    if record.read_size and record.downsample:
        attributes["patch_size_level0"] = round(record.read_size * record.downsample)
    if record.mpp and record.patch_mpp:
        attributes["level0_magnification"] = _magnification(record.mpp)
        attributes["target_magnification"] = _magnification(record.patch_mpp)
    if record.level is not None and record.read_size == slide.patch_size:
        attributes["patch_level"] = record.level
    return attributes


def _magnification(mpp: float) -> float:
    """Return the standard magnification nearest to a scale, or the exact one if none is close."""
    exact = MAGNIFICATION_MPP / mpp
    nearest = min(_USUAL_MAGNIFICATIONS, key=lambda usual: abs(usual - exact))
    return nearest if abs(nearest - exact) <= _MAGNIFICATION_TOLERANCE * nearest else exact
