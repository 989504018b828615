"""What `predict` can predict: the slides of stores, or slide files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from histopipe.dataset.labelling import class_codes
from histopipe.dataset.options import OnError
from histopipe.errors import SlideError, UsageError
from histopipe.geometry import Mpp
from histopipe.inference.classifier import Classifier, check_scale, check_store
from histopipe.inference.predictions_folder import PredictedSlide, PredictionsFolder
from histopipe.inference.slide_run import SlideRun
from histopipe.inference.slide_tiler import SlideTiler, TiledSlide, file_source
from histopipe.inference.stored_slides import StoredSlide, slides_with_patches, stored_slides
from histopipe.slides.discovery import SlideFile, discover, fingerprint
from histopipe.slides.scale import MppSource, check_mpp
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels, read_mpps
from histopipe.store.store import Store
from histopipe.system.files import Closing
from histopipe.system.progress import Progress
from histopipe.tiling.spec import TilingSpec, spec_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """Options of `predict` that decide what is read, and how. `tiling` has those that differ from the training's."""

    batch_size: int = 64
    labels: str | Path | None = None
    allow_extra_rows: bool = False
    on_error: OnError = "raise"
    tiling: Mapping[str, Any]
    mpp_csv: str | Path | None = None
    default_mpp: float | None = None
    max_unreadable: float = 0.01
    workers: int | None = None

    def check_for_stores(self) -> None:
        """Raise a UsageError if an option is given that applies to slide files only."""
        plain = PredictOptions(tiling={})
        names = ("mpp_csv", "default_mpp", "max_unreadable", "workers")
        given = [*self.tiling, *(n for n in names if getattr(self, n) != getattr(plain, n))]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')}", found="a store", expected="slides",
                todo="remove the option: the patches of a store are already made",
            )  # fmt: skip

    def read_labels(self, ids: Sequence[str]) -> Mapping[str, SlideLabel] | None:
        """Read the labels file, if there is one, for slides of these ids."""
        if self.labels is None:
            return None
        return read_labels(Path(self.labels), SlideNames(ids), allow_extra=self.allow_extra_rows)


class StoreSource:
    """The slides of open stores.

    Raises:
        UsageError: the model does not take these patches.
        NothingToDo: no patch, or stains that have not been measured.
    """

    def __init__(
        self, stores: Sequence[Store], classifier: Classifier, options: PredictOptions
    ) -> None:
        self._labels = options.read_labels([r.id for s in stores for r in s.complete.values()])
        rows = slides_with_patches(stores)
        for store in stores:
            check_store(store, classifier)
        slides = stored_slides(
            stores, rows, batch_size=options.batch_size, on_error=options.on_error,
            stain_norm=classifier.stain_norm,
        )  # fmt: skip
        self._slides = {slide.id: slide for slide in slides}
        self.count = len(slides)
        self.settings: Mapping[str, Any] = {}

    def slides(self, run: SlideRun, folder: PredictionsFolder) -> Iterable[StoredSlide]:
        """Return the slides that are not in the folder yet; add the others to `run.kept`."""
        return run.missing(
            self._slides.values(), lambda it: folder.complete(it.id, it.source) is not None
        )

    def current(self, slide: PredictedSlide) -> PredictedSlide:
        """Return a predicted slide with the label and patient that it has now."""
        stored = self._slides.get(slide.slide)
        if stored is None:
            return slide
        record = PredictedSlide.of(stored.record, source=slide.source)
        if self._labels is None:
            return replace(slide, label=record.label, patient=record.patient)
        found = self._labels.get(slide.slide, SlideLabel(None))
        return replace(slide, label=found.label, patient=found.patient or record.patient)

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
        """Do nothing: loading a batch of a store takes no time worth saving."""


class FileSource(Closing):
    """Slide files. They are tiled as the slides of the training were.

    Raises:
        UsageError: an option or a CSV file is wrong, or the tiling of the training is unknown.
        NothingToDo: there is no slide.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        classifier: Classifier,
        options: PredictOptions,
        progress: Progress,
    ) -> None:
        self._classifier, self._options = classifier, options
        self._default_mpp = None
        if options.default_mpp is not None:
            self._default_mpp = check_mpp("--default-mpp", options.default_mpp)
        self._spec = _spec(classifier, options.tiling, progress)
        self._files = discover(paths)
        ids = [slide.id for slide in self._files]
        self._mpps: Mapping[str, Mpp] = {}
        if options.mpp_csv is not None:
            self._mpps = read_mpps(
                Path(options.mpp_csv), SlideNames(ids), allow_extra=options.allow_extra_rows
            )
        self._labels = options.read_labels(ids) or {}
        self._tiler: SlideTiler | None = None
        self.count = len(self._files)
        self.settings: Mapping[str, Any] = {"spec": self._spec.to_json()}

    def slides(self, run: SlideRun, folder: PredictionsFolder) -> Iterable[TiledSlide]:
        """Return the slides that are not in the folder yet; add the others, and failures, to `run`."""
        missing = run.missing(self._files, lambda slide: self._is_complete(slide, folder))
        options, classifier = self._options, self._classifier
        self._tiler = SlideTiler(
            self._spec, batch_size=options.batch_size, stain_norm=classifier.stain_norm,
            max_unreadable=options.max_unreadable, mpps=self._mpps, labels=self._labels,
            default_mpp=self._default_mpp, workers=options.workers,
            check=lambda record: check_scale(record, classifier),
        )  # fmt: skip
        return self._tiler.slides(missing, run.fail)

    def current(self, slide: PredictedSlide) -> PredictedSlide:
        """Return a predicted slide with the label and patient that it has now."""
        found = self._labels.get(slide.slide)
        if found is None:
            return slide
        return replace(slide, label=found.label, patient=found.patient or slide.patient)

    def patch_labels(self, slide: str, classes: Sequence[str]) -> dict[tuple[int, int], int]:
        """Return nothing: patches of files have no annotated classes."""
        return {}

    def close(self) -> None:
        """End the workers."""
        if self._tiler is not None:
            self._tiler.close()

    def _is_complete(self, slide: SlideFile, folder: PredictionsFolder) -> bool:
        """Whether the file has been predicted, at the scale that it has now."""
        try:
            source = file_source(fingerprint(slide))
        except SlideError:
            return False  # reported when it is planned
        found = folder.complete(slide.id, source)
        if found is None:
            return False
        # The header of a slide takes precedence over the scale that is given.
        given = self._mpps.get(slide.id) or self._default_mpp
        return found.mpp_source == MppSource.PROPERTIES or given in (None, found.mpp)


def _spec(classifier: Classifier, tiling: Mapping[str, Any], progress: Progress) -> TilingSpec:
    """Return the tiling of slide files: that of the training, as far as it applies to other slides."""
    spec = classifier.spec
    if spec is None:
        raise UsageError(
            f"{classifier.folder} does not record the tiling of its patches, and its store is missing",
            todo="ingest the slides with the settings of the training, and predict the store",
        )
    tiling, algorithms = dict(tiling), spec.get("algorithms")
    all_tissue = "here, all patches with tissue are predicted"
    if isinstance(algorithms, Mapping) and algorithms.get("grid") == "imported-1":
        progress.message(f"another tool chose the patches of the training: {all_tissue}")
        tiling.setdefault("tissue", "otsu")
    if spec.get("roi") is not None:
        progress.message(
            f"the patches of the training were in the region {spec['roi']!r}: {all_tissue}"
        )
    return spec_from_json(spec, **tiling)
