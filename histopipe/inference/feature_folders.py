"""Folders of feature files: writing a slide for one encoder or several, and the table of slides."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.dataset.bags import Bag
from histopipe.errors import DamagedStore
from histopipe.features import StoredType
from histopipe.features.feature_file import (
    SLIDES,
    FeatureHeader,
    FeatureWriter,
    feature_path,
    read_header,
    writing,
)
from histopipe.inference.slide_run import (
    Network,
    Results,
    SlidePatches,
    SlideRun,
)
from histopipe.predictions.sources import PredictedSlide, PredictionsFolder
from histopipe.slides.scale import MAGNIFICATION_MPP
from histopipe.splits.slide_table import (
    Exclusion,
    SlideEntry,
    read_slide_table,
    write_slide_table,
)
from histopipe.system.files import roomy, write_atomically
from histopipe.system.forecast import Outlook
from histopipe.system.output import Progress
from histopipe.system.shared_folders import ALL, Share

_MAGNIFICATION_TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class FeatureFolder:
    """A folder of feature files of one encoder. For predictions, their folder gets the thumbnails of the slides."""

    encoder: Network
    path: Path
    dtype: StoredType
    predictions: PredictionsFolder | None = None

    def finish(self, writer: FeatureWriter, slide: SlidePatches) -> None:
        """Write what is known of a slide after its features, and its thumbnail."""
        described, identity = slide.predicted(), self.encoder.identity
        writer.finish(
            {
                "slide": slide.id,
                "label": slide.record.label,
                "patient": slide.record.patient,
                "site": slide.record.site,
                **asdict(slide.record.hashes),
                **slide.origin,
                "encoder": identity["encoder"],
                "encoder_sha256": identity.get("sha256"),
                "geometry": json.dumps(described.geometry),
                "skipped": described.skipped,
            },
            _coords_attributes(slide),
        )
        if self.predictions is not None and (picture := slide.thumbnail) is not None:
            path = self.predictions.path_of(slide.id, ".jpg")
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, picture)

    def complete(self, slide: str, source: str, *, keep: bool) -> PredictedSlide | None:
        """Return a slide of a slide file if its features are from the same source; else remove them, unless `keep`."""
        path = feature_path(self.path, slide)
        if not path.exists():
            return None
        with suppress(DamagedStore):
            header = read_header(path)
            if header.attributes.get("source") == source:
                return describe_slide(header, slide, slide, None)
        if not keep:
            path.unlink()
        return None


@dataclass(frozen=True, slots=True)
class FeatureFolders:
    """Folders of several encoders, which compute the patches of a slide together as `network`."""

    folders: Sequence[FeatureFolder]
    network: Network
    share: Share = ALL

    def write(self, slide: SlidePatches, results: Iterator[Results]) -> tuple[int, int]:
        """Write the feature files of a slide. Return the numbers of computed and skipped patches."""
        dimensions = [folder.encoder.dimension for folder in self.folders]
        with ExitStack() as stack:
            writers = [
                stack.enter_context(
                    writing(feature_path(of.path, slide.id), slide.rows, dimension, of.dtype)
                )
                for of, dimension in zip(self.folders, dimensions, strict=True)
            ]
            for features, corners in results:
                parts = np.split(features, np.cumsum(dimensions)[:-1], axis=1)
                for writer, part in zip(writers, parts, strict=True):
                    writer.append(part, corners)
            for folder, writer in zip(self.folders, writers, strict=True):
                folder.finish(writer, slide)
        described = slide.predicted()
        return described.patches, described.skipped

    def complete(self, slide: str, source: str) -> PredictedSlide | None:
        """Return a slide of a slide file if all folders have its features; see `FeatureFolder.complete`."""
        keep = self.share.join  # slide files may be copies, with other times on each machine
        each = [folder.complete(slide, source, keep=keep) for folder in self.folders]
        return each[0] if all(each) else None

    def start(self, work: Mapping[str, float], progress: Progress) -> SlideRun:
        """Start a run of slides with their work, see `SlideRun`."""
        path = self.folders[0].path
        outlook = Outlook(work)
        return SlideRun(self.network, "embedding", len(work), progress, path, outlook, self.share)

    def record_slides(self, slides: Collection[SlideEntry], failed: Mapping[str, str]) -> None:
        """Write which slides were found, those without features with the reason; a part, which slides failed."""
        for folder in self.folders:
            with roomy(folder.path):
                self.share.end(folder.path, failed)
                if not self.share.is_part:
                    record_slides(folder.path, slides, failed)


def record_slides(folder: Path, slides: Iterable[SlideEntry], failed: Collection[str]) -> None:
    """Write which slides were found, those without features with the reason, and keep slides of earlier commands."""
    path = folder / SLIDES
    recorded = {entry.slide: entry for entry in read_slide_table(path)}
    for entry in slides:
        slide = (
            replace(entry, reason=Exclusion.EMBEDDING_FAILED) if entry.slide in failed else entry
        )
        if slide.reason and recorded.get(slide.slide, slide).store != slide.store:
            slide = replace(slide, slide=f"{slide.slide}@{slide.store}")  # of another store
        recorded[slide.slide] = slide
    write_slide_table(path, recorded.values())


def describe_slide(
    header: FeatureHeader, slide: str, patient: str, label: str | None
) -> PredictedSlide | None:
    """Return the slide of a feature file; None if the file does not record its geometry, like those of other tools."""
    try:
        return PredictedSlide(
            slide=slide,
            patient=patient,
            label=label,
            **json.loads(str(header.attributes["geometry"])),
            patches=header.rows,
            source=str(header.attributes.get("source") or header.attributes.get("patches_crc")),
            skipped=int(header.attributes.get("skipped", 0)),
        )
    except (KeyError, TypeError, ValueError):
        return None


def describe_slides(folder: PredictionsFolder, bag: Bag) -> None:
    """Write what is known of the slides of a bag."""
    for slide, part in zip(bag.slides, bag.parts, strict=True):
        described = describe_slide(part.headers[0], slide, bag.patient or slide, bag.label)
        if described is not None:
            path = folder.path_of(slide, ".json")
            path.parent.mkdir(parents=True, exist_ok=True)
            described.write(path)


def _coords_attributes(slide: SlidePatches) -> dict[str, Any]:
    """Return the attributes of the coordinates, with the names that TRIDENT and CLAM use.

    CLAM reads patches at `patch_level` without resampling, so it is written only if they were not resampled.
    """
    record = slide.record
    scales = (record.mpp, record.patch_mpp)
    level0, target = (_magnification(mpp) if mpp and all(scales) else None for mpp in scales)
    return {
        "name": record.id,
        "patch_size": slide.patch_size,
        "overlap": slide.overlap,
        "level0_width": record.width,
        "level0_height": record.height,
        "savetodir": "",
        "patch_size_level0": round(record.side_l0) or None,
        "level0_magnification": level0,
        "target_magnification": target,
        "patch_level": record.level if record.read_size == slide.patch_size else None,
    }


def _magnification(mpp: float) -> float:
    """Return the standard magnification nearest to a scale, or the exact one if none is close."""
    exact = MAGNIFICATION_MPP / mpp
    nearest = min((80, 60, 40, 20, 10, 5), key=lambda usual: abs(usual - exact))
    return nearest if abs(nearest - exact) <= _MAGNIFICATION_TOLERANCE * nearest else exact
