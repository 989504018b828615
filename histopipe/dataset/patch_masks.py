"""Masks of patches: the annotated class of each of their pixels, and a copy of the files that they come from.

All masks are computed when a store is opened, and kept compressed in memory: about 1 kB for a patch of 256 pixels with
smooth outlines, 4 kB with nuclei. So batches cost no clipping of outlines, and each class is known from the start.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.annotation_files import SUFFIXES, file_bytes, find_annotations
from histopipe.annotations.pixel_masks import PixelClasses, read_pixel_classes
from histopipe.annotations.rules import NOT_ANNOTATED, PixelOptions
from histopipe.dataset.selection import Classes
from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.geometry import Mpp, Size
from histopipe.slides.slide_files import SlideNames
from histopipe.store.format import Columns
from histopipe.store.record import SlideRecord, slide_names
from histopipe.store.store import Store, check_patch_sizes
from histopipe.system.files import atomic_write, path_within, read_json, reading, write_json
from histopipe.system.output import default_progress, message, some

COPY = "annotations"
"""Folder of a run with a copy of the annotation files that it used."""
ANNOTATIONS = "annotations.json"
"""File of a run with the checksums of the copy, and the pixels of each class."""
_PNG = (".png",)
_LEAST_SHARE = 0.05
"""Share of the annotated pixels of a patch from which a class can be the one that the patch is drawn for."""
_MOST_CLASSES = NOT_ANNOTATED
NO_CLASS = -1


@dataclass(frozen=True, slots=True)
class SlideMasks:
    """Masks of the patches of a slide.

    Attributes:
        file: the annotation file.
        crc: CRC-32 of the file.
        notes: what was repaired or left out in it.
        classes: classes of the slide, in the order of the numbers in its masks.
        counts: (N, K) pixels of each patch by class; K is 1, without pixels, if there is no class.
        values: compressed mask of each patch.
    """

    file: Path
    crc: int
    notes: tuple[str, ...]
    classes: tuple[str, ...]
    counts: NDArray[np.int64]
    values: Sequence[bytes]


class MaskedStore(Store):
    """A store with the masks of its patches; see `open_stores`.

    Its `classes` are those of pixels. The `patch_labels` of a record are the pixels of each class. The label of a patch is
    the rarest of its classes with a twentieth of its annotated pixels, so that patches can be balanced by class.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.masks: dict[int, SlideMasks] = {}
        self._numbers: dict[int, NDArray[np.uint8]] = {}
        self._labels: dict[int, NDArray[np.int32]] = {}

    def set_classes(self, pixels: Mapping[str, int]) -> None:
        """Number the classes, which are given with the pixels of each in all stores."""
        self.classes = [*pixels]
        number_of = {name: number for number, name in enumerate(self.classes)}
        # The last one is for classes without a pixel.
        totals = np.array([*pixels.values(), 0])
        for slide, masks in self.masks.items():
            numbers = [number_of.get(name, NO_CLASS) for name in masks.classes] or [NO_CLASS]
            self._numbers[slide] = np.full(256, NOT_ANNOTATED, np.uint8)
            self._numbers[slide][: len(numbers)] = np.array(numbers) % 256
            counts = masks.counts
            enough = (counts > 0) & (counts >= _LEAST_SHARE * counts.sum(axis=1, keepdims=True))
            rarest = np.where(enough, totals[numbers], totals.max() + 1).argmin(axis=1)
            labels = np.array([*numbers, NO_CLASS], np.int32)
            self._labels[slide] = labels[np.where(enough.any(axis=1), rarest, -1)]
            of_classes = counts.sum(axis=0).tolist()
            named = dict(zip(masks.classes, of_classes, strict=False))
            self.records[slide] = replace(
                self.records[slide], patch_labels={name: n for name, n in named.items() if n}
            )
        for slide in self.records.keys() - self.masks.keys():
            self.records[slide] = replace(self.records[slide], patch_labels={})
        self.__dict__.pop("complete", None)

    def index(self, slide: int) -> Columns:
        """Return the index columns of a slide; see `Store.index`. `label` is the class of a patch."""
        columns = super().index(slide)
        blank = np.full(len(columns["crc"]), NO_CLASS, np.int32)
        return {**columns, "label": self._labels.get(slide, blank)}

    def mask(self, slide: int, row: int) -> NDArray[np.uint8]:
        """Return the class numbers of the pixels of a patch, (H, W); `NOT_ANNOTATED` where there is none."""
        side = self.patch_size
        if slide not in self.masks:
            return np.full((side, side), NOT_ANNOTATED, np.uint8)
        values = np.frombuffer(zlib.decompress(self.masks[slide].values[row]), np.uint8)
        return self._numbers[slide][values].reshape(side, side)


def open_stores(
    paths: Sequence[Path],
    masks: str | Path | None,
    rules: PixelOptions,
    *,
    stack: ExitStack,
    classes: Classes | None = None,
) -> Sequence[Store]:
    """Open stores, with `masks` from a folder of annotations, or one file; `stack` closes them.

    `classes` are names in the order of their numbers. Default: the sorted classes of all files.

    Raises:
        UsageError: patch sizes differ, there are no annotations, a file cannot be used or is of another slide, or it has a
            class that is not in `classes`.
        NothingToDo: no pixel of any patch is annotated.
    """
    stores = [stack.enter_context((Store if masks is None else MaskedStore)(p)) for p in paths]
    check_patch_sizes(stores)
    masked = [store for store in stores if isinstance(store, MaskedStore)]
    if masks is not None:
        if isinstance(classes, Mapping):
            raise UsageError("classes", found="a mapping", expected="a list of names, with masks")
        _add_masks(masked, Path(masks), rules, classes)
    return stores


def _add_masks(
    stores: Sequence[MaskedStore],
    annotations: Path,
    rules: PixelOptions,
    classes: Sequence[str] | None,
) -> None:
    """Add the masks of all slides that have annotations; raises as `open_stores`."""
    names = slide_names([record for store in stores for record in store.slides])
    files, notes = find_annotations(annotations, names, _PNG if rules.mask_values else SUFFIXES)
    for note in notes:
        message(note)
    complete = [(s, n, r) for s in stores for n, r in s.complete.items() if r.id in files]
    without = [r.id for s in stores for r in s.complete.values() if r.id not in files]
    if without:
        message(f"{len(without)} slides without annotations left out: {some(without, 3)}")
    with default_progress().bar("masks", unit="slides", total=len(complete)) as bar:
        for store, number, record in complete:
            store.masks[number] = _masks_of(store, number, files[record.id], rules)
            bar.advance()
    pixels: dict[str, int] = {}
    for store, number, _ in complete:
        masks = store.masks[number]
        for name, count in zip(masks.classes, masks.counts.sum(axis=0).tolist(), strict=False):
            pixels[name] = pixels.get(name, 0) + count
    noted = [(s.masks[n].file.name, note) for s, n, _ in complete for note in s.masks[n].notes]
    blank = [record.id for s, n, record in complete if not s.masks[n].counts.any()]
    if noted:
        message(
            f"{len(noted)} notes on annotations: {some([': '.join(note) for note in noted], 3)}"
        )
    if blank:
        message(f"{len(blank)} slides without an annotated pixel left out: {some(blank, 3)}")
    order = [name for name in sorted(pixels) if pixels[name]] if classes is None else [*classes]
    unknown = sorted(name for name, count in pixels.items() if count and name not in order)
    if unknown or len(order) > _MOST_CLASSES:
        raise UsageError(
            f"classes of {annotations}",
            found=some(unknown, 3) or f"{len(order)} classes",
            expected=", ".join(order) if unknown else f"at most {_MOST_CLASSES}",
        )
    if not any(pixels.values()):
        raise NothingToDo(
            f"no pixel of any patch is annotated in {annotations}",
            todo="check that outlines have classes (--unclassified, --class-property) and are on patches of the store",
        )
    for store in stores:
        store.set_classes({name: pixels.get(name, 0) for name in order})


def pixel_classes(record: SlideRecord, file: Path, rules: PixelOptions) -> PixelClasses:
    """Read the classes of the pixels of a slide from its annotation file. Raise a UsageError as `read_pixel_classes`."""
    return read_pixel_classes(
        file,
        rules,
        size=Size(record.width, record.height),
        bounds=record.frame_bounds,
        mpp=None if record.mpp is None else Mpp(record.mpp),
        orientation=record.orientation or 1,
    )


def _masks_of(store: Store, slide: int, file: Path, rules: PixelOptions) -> SlideMasks:
    """Compute the masks of all patches of a slide."""
    record, index = store.records[slide], store.index(slide)
    crc = _crc_of(file)
    of_pixels = pixel_classes(record, file, rules)
    counts, values, width = [], [], max(1, len(of_pixels.classes))
    for x, y in zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True):
        mask = of_pixels.mask(x, y, record.side_l0, store.patch_size)
        counts.append(np.bincount(mask.ravel(), minlength=256)[:width] * bool(of_pixels.classes))
        values.append(zlib.compress(mask.tobytes(), 1))
    table = np.array(counts, np.int64).reshape(len(values), width)
    return SlideMasks(file, crc, of_pixels.notes, of_pixels.classes, table, values)


def _crc_of(file: Path) -> int:
    try:
        return zlib.crc32(file_bytes(file))
    except OSError as error:
        raise UsageError(f"{file} cannot be read", found=error.strerror or str(error)) from error


def write_copy(sources: Sequence[Any], folder: Path, *, resume: bool = False) -> None:
    """Copy the annotation files of stores with masks into a folder, with their checksums and the pixels of each class.

    Nothing is written without masks, or if the training is resumed.

    Raises:
        UsageError: a file has changed since it was read.
    """
    stores = [source for source in sources if isinstance(source, MaskedStore) and not resume]
    if not stores:
        return
    slides: dict[str, Any] = {}
    for store in stores:
        for number, masks in store.masks.items():
            record = store.records[number]
            name = f"{record.id}{masks.file.suffix.lower()}"
            data = file_bytes(masks.file)
            if zlib.crc32(data) != masks.crc:
                raise UsageError(f"{masks.file} was changed while it was read", todo="train again")
            path = path_within(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as part:
                part.write_bytes(data)
            slides[record.id] = {"file": name, "crc32": masks.crc, "pixels": record.patch_labels}
    write_json(
        folder.with_name(ANNOTATIONS), {"classes": list(stores[0].classes), "slides": slides}
    )


def check_copy(folder: Path, original: Path, rules: PixelOptions) -> None:
    """Compare the copy of annotations in a run with its checksums, and with the originals if these exist.

    Raises:
        DamagedStore: the copy is damaged.
        UsageError: the original of a slide has changed, or is missing in its folder.
    """
    index = folder.with_name(ANNOTATIONS)
    with reading(index, todo="start a new run"):
        recorded = {
            slide: (str(entry["file"]), int(entry["crc32"]))
            for slide, entry in read_json(index)["slides"].items()
        }
    for slide, (name, crc) in recorded.items():
        path = path_within(folder, name)
        if not path.is_file() or _crc_of(path) != crc:
            raise DamagedStore(
                f"{path} is damaged",
                found=f"other annotations of slide {slide}",
                todo="start a new run",
            )
    if not original.exists() or original.resolve() == folder.resolve():
        return
    # Those of a core may be those of its slide.
    names = SlideNames(recorded, parents={slide: slide.rpartition("/")[0] for slide in recorded})
    files, _ = find_annotations(original, names, _PNG if rules.mask_values else SUFFIXES)
    for slide, (_, crc) in recorded.items():
        if slide not in files or _crc_of(files[slide]) != crc:
            raise UsageError(
                f"slide {slide} has other annotations than at the start of the run",
                found=str(files.get(slide, f"no file in {original}")),
                expected=f"the file that is in {folder}",
                todo=f"restore it, start a new run, or continue with the copy (--masks {folder})",
            )
