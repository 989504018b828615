"""Read slides from stores, for `embed` and `predict`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from histopipe.dataset.options import OnError, PatchColumn, StainNorm
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.sampling import Order
from histopipe.dataset.selection import SampleRows, SampleTable, select
from histopipe.errors import NothingToDo, UsageError
from histopipe.inference.classifier import PredictOptions, TrainedPatches, check_store
from histopipe.inference.slide_run import Normalizer, PatchBatch, SlideRun, slide_batches
from histopipe.predictions.sources import FindComplete, PredictedSlide
from histopipe.slides.tables import SlideLabel
from histopipe.splits.labelling import Labelling, class_codes
from histopipe.splits.slide_table import SlideEntry, table_of
from histopipe.splits.splits import patches_crc
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.tensorflow import load_quietly

_CORNER: tuple[PatchColumn, ...] = ("x_l0", "y_l0")


class StoredSlide:
    """The patches of a slide in a store. No batch mixes slides, so results do not depend on other slides."""

    def __init__(
        self,
        store: Store,
        number: int,
        batches: PatchBatches,
        normalize: Normalizer | None,
        rule: str | None,
    ) -> None:
        self.store, self.number, self.batches = store, number, batches
        self.record = store.records[number]
        self._divided = slide_batches(self.rows, batches.batch_size, rule)
        self.id, self.steps = self.record.id, len(self._divided)
        self._normalize = normalize

    @property
    def origin(self) -> Mapping[str, Any]:
        """Where the patches are from, for the attributes of feature files."""
        return {"store": self.store.uuid, "patches_crc": self.patches_crc}

    def close(self) -> None:
        """Do nothing: the store stays open."""

    @property
    def rows(self) -> int:
        """Number of patches in the store."""
        return len(self.batches.table)

    @property
    def patch_size(self) -> int:
        """Side of the patches in pixels."""
        return self.store.patch_size

    @property
    def overlap(self) -> int:
        """Overlap of neighbouring patches in pixels."""
        return int(self.store.spec["overlap"])

    @property
    def patches_crc(self) -> int:
        """Checksum of all patches of the slide."""
        return patches_crc(self.store, self.number)

    @property
    def source(self) -> str:
        """Text that identifies the patches as the source of predictions."""
        return f"store {self.store.uuid}, patches {self.patches_crc:08x}"

    @property
    def thumbnail(self) -> bytes | None:
        """Thumbnail as a JPEG file, if the store has one."""
        return self.store.thumbnail(self.number)

    @property
    def patches(self) -> int:
        """Number of patches, without the damaged patches that have been skipped so far."""
        return self.rows - self.skipped

    @property
    def skipped(self) -> int:
        """Number of damaged patches that have been skipped so far."""
        return len(self.batches.skipped)

    def load(self, step: int) -> PatchBatch:
        """Load a batch; see `SlidePatches`."""
        batch = self.batches.read(*self.batches.at(np.array(self._divided[step])))
        images = batch["image"]
        if self._normalize is not None:
            images = self._normalize(images, batch["key"])
        corners = np.stack([batch[name] for name in _CORNER], axis=1)
        return PatchBatch(images, corners, batch["weight"] > 0)

    def predicted(self) -> PredictedSlide:
        """Describe the slide after its patches have been predicted."""
        return PredictedSlide.of(
            self.record, source=self.source, patches=self.patches, skipped=self.skipped
        )


def slides_with_patches(stores: Sequence[Store]) -> list[SampleRows]:
    """Return the rows of every slide that has patches.

    Raises:
        NothingToDo: there is no such slide.
        UsageError: patch sizes differ, or slides in two stores have the same id and would use the same file.
    """
    check_patch_sizes(stores)
    slides = [rows for rows in select(stores) if rows.count]
    if not slides:
        raise NothingToDo("the stores hold no patches", todo="check them with `histopipe info`")
    ids = Counter(stores[rows.store].records[rows.slide].id for rows in slides)
    twice = [name for name, times in ids.items() if times > 1]
    if twice:
        raise UsageError(
            "slides with the same id in several stores", found=", ".join(twice[:3]),
            todo="run the command for each store, with different --out",
        )  # fmt: skip
    return slides


def stored_slides(
    stores: Sequence[Store],
    slides: Sequence[SampleRows],
    *,
    batch_size: int,
    on_error: OnError,
    stain_norm: StainNorm,
    rule: str | None,
) -> list[StoredSlide]:
    """Return readers of the slides from `slides_with_patches`, in batches by a rule of `slide_batches`.

    `stain_norm="none"` disables stain normalization.

    Raises:
        NothingToDo: the stain of a slide has not been measured.
        MachineShort: stain normalization needs TensorFlow, which is not installed.
    """
    normalize = None
    if stain_norm != "none":
        module = load_quietly("histopipe.dataset.stain_normalization")
        normalize = module.store_normalizer(stores, stain_norm)
    readers = []
    for rows in slides:
        table = SampleTable([rows])
        batches = PatchBatches(
            stores, table, batch_size=batch_size, order=Order(len(table)), on_error=on_error,
            columns=_CORNER,
        )  # fmt: skip
        readers.append(StoredSlide(stores[rows.store], rows.slide, batches, normalize, rule))
    return readers


class StoreSource:
    """The slides of open stores.

    Raises:
        UsageError: the model does not take these patches.
        NothingToDo: there is no patch, or stains have not been measured.
    """

    def __init__(
        self, stores: Sequence[Store], trained: TrainedPatches, options: PredictOptions
    ) -> None:
        self._stores = stores
        self._labels = options.read_labels([r.id for s in stores for r in s.complete.values()])
        rows = slides_with_patches(stores)
        for store in stores:
            check_store(store, trained)
        slides = stored_slides(
            stores, rows, batch_size=options.batch_size, on_error=options.on_error,
            stain_norm=trained.stain_norm, rule=options.batch_rule,
        )  # fmt: skip
        self._slides = {slide.id: slide for slide in slides}
        self.count = len(slides)
        self.settings: Mapping[str, Any] = {}

    def slide_table(self, predicted: Iterable[PredictedSlide]) -> list[SlideEntry]:
        """Return all slides of the stores, excluded if they have no patches."""
        return table_of(self._stores, Labelling(labels=self._labels))

    def slides(self, run: SlideRun, complete: FindComplete) -> Iterable[StoredSlide]:
        """Return the slides that are not complete yet, and add the others to `run.kept`."""
        return run.missing(
            self._slides.values(), lambda slide: complete(slide.id, slide.source) is not None
        )

    def current(self, slide: PredictedSlide) -> PredictedSlide:
        """Return a predicted slide with its current label and patient."""
        stored = self._slides.get(slide.slide)
        if stored is None:
            return slide
        record = PredictedSlide.of(stored.record, source=slide.source)
        if self._labels is None:
            return replace(slide, label=record.label, patient=record.patient)
        row = self._labels.get(slide.slide, SlideLabel(None))
        return replace(slide, label=row.label, patient=row.patient or record.patient)

    def patch_labels(self, slide: str, classes: Sequence[str]) -> dict[tuple[int, int], int]:
        """Return the annotated class number of each patch of a slide, or -1, by its corner."""
        stored = self._slides.get(slide)
        if stored is None:
            return {}
        index = stored.store.index(stored.number)
        corners = zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True)
        codes = class_codes(stored.store, stored.number, classes)
        return dict(zip(corners, codes.tolist(), strict=True))

    def close(self) -> None:
        """Do nothing: batches of a store load so fast that they need no cancelling."""
