"""Read slides from stores, for `embed` and `predict`, and check that their patches are those that a model takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.sampling import Order
from histopipe.dataset.selection import PatchColumn, SampleRows, SampleTable, select, store_paths
from histopipe.errors import DamagedStore, NothingToDo, OnError, ScaleError, SlideError, UsageError
from histopipe.features.feature_file import (
    SUFFIX,
    feature_files,
    read_coords,
    read_features,
    read_header,
)
from histopipe.geometry import Mpp, same_scale
from histopipe.inference.feature_folders import describe_slide
from histopipe.inference.options import PredictOptions
from histopipe.inference.slide_run import (
    Normalizer,
    PatchBatch,
    SlidePatches,
    SlideRun,
    SlideSource,
    slide_batches,
)
from histopipe.predictions.sources import FindComplete, PredictedSlide
from histopipe.slides.slide_files import SlideNames
from histopipe.slides.tables import SlideLabel, read_labels
from histopipe.splits.labelling import Labelling, class_codes
from histopipe.splits.slide_table import Exclusion, SlideEntry, table_of
from histopipe.splits.splits import patches_crc
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.files import reading
from histopipe.system.folders import ENCODER, FolderKind, folder_kind
from histopipe.system.shared_folders import ALL, Share
from histopipe.system.table_cells import NA_VALUES, source_column
from histopipe.system.table_files import read_table
from histopipe.system.tensorflow import load_quietly
from histopipe.system.urls import is_url
from histopipe.tasks.choices import StainNorm

SourceKind = Literal["stores", "features", "slides"]
_CORNER: tuple[PatchColumn, ...] = ("x_l0", "y_l0")


@dataclass(frozen=True, slots=True)
class PatchRequirements:
    """The patches that a model takes: those of its training. `owner` is the folder of the run, for messages."""

    owner: Path
    patch_size: int
    spec: Mapping[str, Any] | None
    """Tiling of the patches; None if it is not recorded."""
    patch_mpp: float | None
    stain_norm: StainNorm

    def fit(self, store: Store) -> bool:
        """Return whether the patches of a store have this size and scale."""
        with suppress(UsageError, ScaleError):
            check_store(store, self)
            return True
        return False


def trained_patches(record: Mapping[str, Any], owner: Path) -> PatchRequirements:
    """Return the patches of a record. `owner` is the folder of the run.

    Raises:
        DamagedStore: the record is damaged.
    """
    with reading(f"the record of the encoder in {owner}"):
        patches = record["patches"]
        return PatchRequirements(
            owner,
            int(patches["patch_size"]),
            patches["spec"],
            patches["patch_mpp"],
            record["stain_norm"],
        )


def read_current_labels(
    options: PredictOptions, ids: Sequence[str], targets: Sequence[str] = ()
) -> Mapping[str, SlideLabel] | None:
    """Read the labels file, if there is one, for slides with these ids.

    Of a model of other `targets` than a class, columns of targets and labels need not be there.
    """
    if options.labels is None:
        return None
    path = Path(options.labels)
    present = read_table(path, columns=("slide",)).columns
    return read_labels(
        path,
        SlideNames(ids),
        columns=[name for name in targets if source_column(name) in present],
        groups=options.subgroup_columns,
        with_label=not targets or "label" in present,
        allow_extra=options.allow_extra_rows,
        na=NA_VALUES if options.na is None else options.na,
    )


def check_scale(record: SlideRecord, required: PatchRequirements) -> None:
    """Check that the patches of a slide have the scale of the training patches.

    The scales can differ if patches were read from a pyramid level without resampling.

    Raises:
        ScaleError: the scales differ.
    """
    mpp, expected = record.patch_mpp, required.patch_mpp
    if mpp is not None and expected is not None and not same_scale(Mpp(mpp), Mpp(expected)):
        raise ScaleError(
            f"{record.id}: the scale of its patches differs from the training patches of {required.owner}",
            found=f"{mpp:g} µm per pixel",
            expected=f"{expected:g}",
            todo="train on patches ingested with --mpp, which selects a level for each slide",
        )


def check_store(store: Store, required: PatchRequirements) -> None:
    """Check that the patches of a store have the size and scale of the training patches.

    Raises:
        UsageError, ScaleError: size or scale differ.
    """
    if store.patch_size != required.patch_size:
        raise UsageError(
            f"{store.path}: the size of its patches differs from the training patches of {required.owner}",
            found=f"{store.patch_size} pixels",
            expected=f"{required.patch_size}",
        )
    for record in store.complete.values() if store.spec.get("level") is not None else ():
        check_scale(record, required)
    names, spec = ("mpp", "level"), required.spec
    if spec is not None and any(store.spec.get(name) != spec.get(name) for name in names):
        raise UsageError(
            f"{store.path}: the scale of its patches differs from the training patches of {required.owner}",
            found=", ".join(f"{name} {store.spec.get(name)}" for name in names),
            expected=", ".join(f"{name} {spec.get(name)}" for name in names),
            todo="ingest the slides with the settings of the training",
        )


def check_stores(stores: Sequence[Store], trained: Sequence[PatchRequirements]) -> None:
    """Check that every store has the patches of a feature set, and every set a store."""
    for store in stores:
        if len(trained) == 1:
            check_store(store, trained[0])
        elif not any(patches.fit(store) for patches in trained):
            raise UsageError(
                f"{store.path}: its patches are not those of a feature set of the training",
                found=f"{store.patch_size} pixels, mpp {store.spec.get('mpp')}",
                expected=" or ".join(
                    f"{patches.patch_size} pixels, mpp {(patches.spec or {}).get('mpp')}"
                    for patches in trained
                ),
            )
    for number, patches in enumerate(trained, 1):
        if not any(patches.fit(store) for store in stores):
            raise NothingToDo(
                f"no store has the patches of feature set {number} of the training",
                expected=f"{patches.patch_size} pixels, mpp {(patches.spec or {}).get('mpp')}",
                todo="name the stores of all feature sets",
            )


class StoredSlide(SlidePatches):
    """The patches of a slide in a store, read by `batches`."""

    def __init__(
        self,
        store: Store,
        number: int,
        batches: PatchBatches,
        normalize: Normalizer | None,
        rule: str | None,
    ) -> None:
        rows = len(batches.table)
        super().__init__(
            store.records[number],
            slide_batches(rows, batches.batch_size, rule),
            rows=rows,
            patch_size=store.patch_size,
            overlap=int(store.spec["overlap"]),
            lost=batches.skipped,
        )
        self.store, self.number = store, number
        self._batches, self._normalize = batches, normalize

    @property
    def origin(self) -> Mapping[str, Any]:  # noqa: D102
        return {
            "store": self.store.uuid,
            "patches_crc": patches_crc(self.store, self.number),
        }

    @property
    def source(self) -> str:  # noqa: D102
        return f"store {self.store.uuid}, patches {self.origin['patches_crc']:08x}"

    @property
    def thumbnail(self) -> bytes | None:  # noqa: D102
        return self.store.thumbnail(self.number)

    def load(self, step: int) -> PatchBatch:  # noqa: D102
        batch = self._batches.read(*self._batches.at(np.array(self.batch_rows[step])))
        images = batch["image"]
        if self._normalize is not None:
            images = self._normalize(images, batch["key"])
        return PatchBatch(
            images, np.stack([batch[name] for name in _CORNER], axis=1), batch["weight"] > 0
        )


def slides_with_patches(stores: Sequence[Store], share: Share = ALL) -> list[SampleRows]:
    """Return the rows of the slides that have patches, and that this process does.

    Raises:
        NothingToDo: there is no such slide.
        UsageError: patch sizes differ, or slides in two stores have the same id and would use the same file.
    """
    check_patch_sizes(stores)
    slides = [rows for rows in select(stores) if rows.count]
    if not slides:
        raise NothingToDo("the stores hold no patches", todo="check them with `histopipe info`")
    ids = [stores[rows.store].records[rows.slide].id for rows in slides]
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise UsageError(
            "slides with the same id in several stores",
            found=", ".join(twice[:3]),
            todo="run the command for each store, with different --out",
        )
    chosen = share.chosen(patch_counts(stores, slides))
    return [rows for name, rows in zip(ids, slides, strict=True) if name in chosen]


def _sorted_by_row(store: Store, slide: SampleRows) -> SampleRows:
    index = store.index(slide.slide)
    rows = np.arange(slide.count) if slide.rows is None else slide.rows
    order = np.lexsort((index["x_l0"][rows], index["y_l0"][rows]))
    return replace(slide, rows=rows[order].astype(np.int32))


def patch_counts(stores: Sequence[Store], slides: Iterable[SampleRows]) -> dict[str, int]:
    """Return the number of patches of slides by id, those of all stores together."""
    counts = Counter[str]()
    for rows in slides:
        counts[stores[rows.store].records[rows.slide].id] += rows.count
    return dict(counts)


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
    normalize = (
        None
        if stain_norm == "none"
        else load_quietly("histopipe.dataset.transforms").store_normalizer(stores, stain_norm)
    )
    return [
        StoredSlide(
            stores[rows.store],
            rows.slide,
            PatchBatches(
                stores,
                SampleTable([rows]),
                batch_size=batch_size,
                order=Order(rows.count),
                on_error=on_error,
                columns=_CORNER,
            ),
            normalize,
            rule,
        )
        for rows in slides
    ]


class StoreSource(SlideSource):
    """The slides of open stores, in batches by a rule of `slide_batches`; `targets` as for `read_current_labels`.

    With `by_row`, the patches of a slide are sorted by row.

    Raises:
        UsageError: the model does not take these patches.
        NothingToDo: there is no patch, or stains have not been measured.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        required: PatchRequirements,
        options: PredictOptions,
        rule: str | None,
        targets: Sequence[str] = (),
        *,
        by_row: bool = False,
    ) -> None:
        self._stores = stores
        ids = [record.id for store in stores for record in store.complete.values()]
        self._labelling = Labelling(labels=read_current_labels(options, ids, targets))
        rows = slides_with_patches(stores, options.share)
        if by_row:
            rows = [_sorted_by_row(stores[slide.store], slide) for slide in rows]
        for store in stores:
            check_store(store, required)
        slides = stored_slides(
            stores,
            rows,
            batch_size=options.batch_size,
            on_error=options.on_error,
            stain_norm=required.stain_norm,
            rule=rule,
        )
        self.work = {slide.id: slide.rows for slide in slides}
        self._slides, self.count = {slide.id: slide for slide in slides}, len(slides)
        self.labels = {slide.id: self._labelling.label_of(slide.record) for slide in slides}

    def slide_table(self, predicted: Iterable[PredictedSlide]) -> list[SlideEntry]:  # noqa: D102
        return table_of(self._stores, self._labelling)

    def slides(self, run: SlideRun, complete: FindComplete) -> Iterable[StoredSlide]:  # noqa: D102
        return run.missing(
            self._slides.values(), lambda slide: complete(slide.id, slide.source) is not None
        )

    def patch_labels(  # noqa: D102
        self, slide: str, classes: Sequence[str]
    ) -> dict[tuple[int, int], int]:
        stored = self._slides.get(slide)
        if stored is None:
            return {}
        index = stored.store.index(stored.number)
        corners = zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True)
        return dict(
            zip(corners, class_codes(stored.store, stored.number, classes).tolist(), strict=True)
        )


class FeaturePatches(SlidePatches):
    """The features of the patches of a slide in a file, which stand in the place of images.

    Raises:
        SlideError: the file does not record where the patches are.
    """

    thumbnail, origin = None, MappingProxyType[str, Any]({})

    def __init__(self, path: Path, slide: str, batch_size: int) -> None:
        self._header = header = read_header(path)
        corners, label = read_coords(header), header.text("label")
        described = describe_slide(header, slide, header.text("patient") or slide, label)
        if corners is None or described is None:
            raise SlideError(
                f"{path}: places of the patches", expected="features of `histopipe embed`"
            )
        self._corners, self._described = corners, described
        # Not by the base class: a file has no record of a store.
        self.id, self.rows = slide, header.rows
        self.lost = self._lost = set[int]()
        self.batch_rows = slide_batches(self.rows, batch_size)
        self.steps = len(self.batch_rows)

    def predicted(self) -> PredictedSlide:  # noqa: D102
        lost = len(self.lost)
        before = self._described
        return replace(before, patches=self.rows - lost, skipped=before.skipped + lost)

    @property
    def source(self) -> str:  # noqa: D102
        return f"features, crc32 {self._header.attributes.get('crc32', self._header.sample)}"

    def load(self, step: int) -> PatchBatch:  # noqa: D102
        rows = np.array(self.batch_rows[step])
        values = read_features(self._header, rows).astype(np.float32)
        is_valid = np.asarray(np.isfinite(values).all(axis=1))
        self._lost.update(rows[~is_valid].tolist())
        return PatchBatch(values, self._corners[rows], is_valid)


def table_of_labels(
    names: Iterable[str],
    labels: Mapping[str, SlideLabel],
    predicted: Iterable[PredictedSlide],
    empty: Collection[str] = (),
) -> list[SlideEntry]:
    """Return slides by name, and others that were predicted earlier, with their current labels; `empty` have no patches."""
    by_name, slides = {slide.slide: slide for slide in predicted}, []
    for name in dict.fromkeys([*names, *by_name]):
        slide, row = by_name.get(name), labels.get(name) or SlideLabel(None)
        label = row.label or (slide and slide.label) or ""
        slides.append(
            SlideEntry(
                slide=name,
                patient=row.patient or (slide and slide.patient) or name,
                site=row.site or "",
                label=label,
                label_source="labels file" if label else "",
                measured={} if slide is None or slide.mpp is None else {"mpp": f"{slide.mpp:.4g}"},
                cells=dict(row.cells),
                reason=Exclusion.NO_PATCHES if name in empty else None,
            )
        )
    return slides


class FeatureSource(SlideSource):
    """The slides of folders of features, of each the first; `targets` as for `read_current_labels`."""

    def __init__(
        self, folders: Sequence[Path], options: PredictOptions, targets: Sequence[str] = ()
    ) -> None:
        self._files: dict[str, Path] = {}
        for folder in reversed(folders):
            self._files |= feature_files(folder)
        self._batch_size = options.batch_size
        self.work = {slide: path.stat().st_size for slide, path in self._files.items()}
        self.count = len(self._files)
        self.labels = read_current_labels(options, [*self._files], targets) or {}

    def slides(self, run: SlideRun, complete: FindComplete) -> Iterable[FeaturePatches]:  # noqa: D102
        for slide, path in self._files.items():
            try:
                patches = FeaturePatches(path, slide, self._batch_size)
            except (SlideError, DamagedStore) as error:
                run.fail(slide, str(error))
            else:
                yield from run.missing([patches], lambda each: bool(complete(each.id, each.source)))

    def slide_table(self, predicted: Iterable[PredictedSlide]) -> list[SlideEntry]:  # noqa: D102
        return table_of_labels(self._files, self.labels, predicted)


def read_sources(
    sources: str | Path | Sequence[str | Path],
) -> tuple[list[Path | str], SourceKind]:
    """Return the paths of sources, then the URLs, which are of slides; and their kind.

    Raises:
        NothingToDo: a path does not exist.
        UsageError: there is no source, or they are of several kinds.
    """
    entries = [sources] if isinstance(sources, str | Path) else list(sources)
    urls = [entry for entry in entries if isinstance(entry, str) and is_url(entry)]
    rest = [entry for entry in entries if entry not in urls]
    paths = store_paths(rest) if rest or not urls else []
    for path in paths:
        if not path.exists():
            raise NothingToDo(f"{path} does not exist", todo="check the path")
    names = sorted({_kind(path) for path in paths}) or ["slides"]
    with_urls = urls and names in (["features"], ["stores"])
    mixed = [*names, *(["slides at URLs"] if with_urls else [])]
    if len(mixed) > 1:
        raise UsageError(
            f"{' and '.join(mixed)} are mixed",
            expected="stores, features or slides",
            todo="run the command for each, with different --out",
        )
    return [*paths, *urls], names[0]


def _kind(path: Path) -> SourceKind:
    if folder_kind(path) is FolderKind.STORE:
        return "stores"
    if path.is_dir() and ((path / ENCODER).exists() or any(path.rglob(f"*{SUFFIX}"))):
        return "features"
    return "slides"
