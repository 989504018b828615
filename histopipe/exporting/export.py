"""Export stores (patches, index, tissue masks), the model of a run, or features, for other programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.annotation_files import GEOJSON
from histopipe.dataset.selection import store_paths
from histopipe.errors import ExitCode, NothingToDo, UsageError, needs_extra
from histopipe.exporting.anndata_files import export_h5ad
from histopipe.exporting.exported_models import ModelExport, ModelFormat, export_model
from histopipe.exporting.patches import ExportResult, PatchFormat, export_patches
from histopipe.geometry import Mpp, PointL0, RegionL0, Size
from histopipe.ingestion.cluster.cluster_parts import on_cluster
from histopipe.reports.tissue import read_journals, write_table_and_page
from histopipe.store.format import Columns
from histopipe.store.reading import decode_picture
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.files import (
    ENCODER,
    FolderKind,
    atomic_write,
    folder_kind,
    path_within,
    writable,
)
from histopipe.system.filesystems import roomy
from histopipe.system.output import Bar, Progress, Result, counted, default_progress, slide_failure
from histopipe.system.parts import ALL, PARTS, PartOptions, Share
from histopipe.system.settings import make_settings
from histopipe.system.table_files import write_table
from histopipe.system.urls import is_url, public_url
from histopipe.tiling.spec import recorded_tissue
from histopipe.tissue_masks.mask import Grid, TissueMask
from histopipe.tissue_masks.mask_files import TissueReport, read_png_grid, write_slide_mask


def export_masks(store: Path, *, out: Path, share: Share, progress: Progress) -> TissueReport:
    """Write the tissue masks of the complete slides of a store, with the same files as `tissue`; see `export`.

    Raises:
        UsageError: the folder has masks, which may have been corrected.
        NothingToDo: the store has no masks.
    """
    if any(out.rglob(f"*{GEOJSON[0]}")) and not (out / PARTS).is_dir():
        raise UsageError(
            f"{out} has masks already",
            expected="a folder without masks",
            todo="choose another --out: they may have been corrected",
        )
    result = TissueReport(out)
    with Store(store) as opened, share.held(out), roomy(out):
        complete = opened.complete
        if not complete:
            raise NothingToDo(f"{store} has no complete slide", todo="see `histopipe info`")
        chosen = share.chosen({record.id: record.planned for record in complete.values()})
        read_journals(result, share, chosen)
        mine = {n: r for n, r in complete.items() if r.id in chosen and not share.join}
        with progress.bar("exporting masks", unit="slides", total=len(mine)) as bar:
            for slide, record in mine.items():
                where, notes = f"{store}, slide {record.id}", list(record.notes)
                thumbnail, mask = opened.thumbnail(slide), opened.thumbnail(slide, "mask")
                try:
                    if thumbnail is None or mask is None:
                        raise NothingToDo("the store has no tissue mask of it")  # noqa: TRY301
                    pixels = decode_picture(mask, f"{where}: tissue mask", mode="L") > 0
                    grid = read_png_grid(bytes(mask))
                    if grid is None:
                        grid = _estimate_grid(record, pixels)
                        notes.append(
                            "outlines may be off by a pixel: an older version wrote the store"
                        )
                    left, top, width, height = record.bounds
                    row = write_slide_mask(
                        out,
                        record.id,
                        TissueMask(pixels),
                        grid,
                        bounds=RegionL0(PointL0(left, top), Size(width, height)),
                        thumbnail=decode_picture(thumbnail, where),
                        mpp=None if record.mpp is None else Mpp(record.mpp),
                        source=record.mask or str(recorded_tissue(opened.spec)),
                        notes=notes,
                        orientation=record.orientation or 1,
                        # Of a part that is done again: it may have been corrected.
                        outlines=not path_within(out, f"{record.id}{GEOJSON[0]}").exists(),
                    )
                    result.slides.append(row)
                except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                    result.failed[record.id] = slide_failure(error)
                bar.advance()
        write_table_and_page(result, share)
    return result


def _estimate_grid(record: SlideRecord, mask: NDArray[np.bool_]) -> Grid:
    """Return the grid of a stored mask from its size: older stores do not record it."""
    left, top, width, height = record.bounds
    size, slide = Size(mask.shape[1], mask.shape[0]), Size(record.width, record.height)
    longer, count = max(width, height), max(*mask.shape, 1)
    # Usually a whole number: the last pixel is only in part inside the slide.
    sides = range(max(1, longer // count), math.ceil(longer / max(1, count - 1)) + 1)
    exact = (side for side in sides if Size(-(-width // side), -(-height // side)) == size)
    return Grid(left, top, next(exact, longer / count), size, slide)


IndexFormat = Literal["csv", "parquet"]

_OF_SLIDE = ("store", "slide", "patient", "site", "label")
_OF_PATCH = (
    "patch",
    "x_l0",
    "y_l0",
    "size_l0",
    "x_level",
    "y_level",
    "level",
    "mpp",
    "tissue",
    "focus",
    "bytes",
    "annotation",
)
_GROUP_ROWS = 100_000
"""Minimum number of rows in a Parquet row group. Readers load a whole row group."""


@dataclass(frozen=True, repr=False)
class IndexResult(Result):
    """Result of exporting an index: the table and the number of its rows, one per patch."""

    exit_code: ClassVar[ExitCode] = ExitCode.DONE

    file: Path
    rows: int

    def __str__(self) -> str:
        return f"{counted(self.rows, 'patch')}: {self.file}"


def export(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    to: PatchFormat | ModelFormat | Literal["masks", "h5ad"] | None = None,
    index: IndexFormat | None = None,
    shard_patches: int = 10_000,
    predictions: str | Path | None = None,
    progress: Progress | None = None,
    **machines: Any,
) -> ExportResult | IndexResult | TissueReport | ModelExport:
    """Export the index, the patches or the tissue masks of stores, the model of a run, or features.

    Args:
        sources: one or several stores; a run; or a folder of features. Patches can be exported from one store only, and are
            neither decoded nor encoded.
        out: file of the index, or folder of the patches. Files that already exist in the folder are kept. With "tfrecord"
            and "webdataset" also a URL: s3://, gs:// or az://.
        to: format of the patches. "tfrecord": one file per slide, with slideflow's feature names. "webdataset": tar
            files of `shard_patches` patches, each an image and a JSON file. "folder": images by label and slide.
            "masks": the tissue masks, as `tissue` writes them. Of a run "onnx" or "keras", see `export_model`. Of features
            "h5ad", see `export_h5ad`.
        index: format of the index: "csv" or "parquet".
        shard_patches: number of patches per tar file.
        predictions: folder of `predict`, or a run, whose values are added to "h5ad".
        progress: shows the progress; `default_progress()` if None.
        machines: options of several machines by name, for `to` into a local folder, as in docs/reference/settings.md.

    Returns:
        The files and the number of patches written.

    Raises:
        UsageError: both or neither of `to` and `index` are given, `out` has other content, or the format is not one of the
            kind of the folder.
        NothingToDo: there is no store, or no patch.
        MachineShort: the disk is full, or a library is not installed.
        Interrupted: by Ctrl-C or SIGTERM; complete files are kept.

    Example:
        >>> export("patches.lmdb", "index.parquet", index="parquet")  # doctest: +SKIP
        403 patches: index.parquet
        >>> export("runs/first", "model", to="onnx")  # doctest: +SKIP
        model/model.onnx, model/model-channels-first.onnx, model/model.json; equals Keras to 1e-07
        >>> export("patches.lmdb", "shards", to="webdataset")  # doctest: +SKIP
        403 patches in 1 files, 0 files already done: shards
    """
    options, display = make_settings(PartOptions, machines), progress or default_progress()
    share = options.share
    _check_options(out, to, index, predictions, options)
    of_folder = _export_folder(sources, out, to, predictions, display)
    if of_folder is not None:
        return of_folder
    if options.cluster:
        return on_cluster(
            export,
            sources,
            out,
            to=to,
            shard_patches=shard_patches,
            progress=display,
            **machines,
        )
    if is_url(out) and (index is not None or to == "masks"):
        raise UsageError(
            "--out",
            found=public_url(str(out)),
            expected="a local path",
            todo="copy the result to the URL",
        )
    if index is not None:
        return export_index(store_paths(sources), out=Path(out), kind=index, progress=display)
    requested = [sources] if isinstance(sources, str | Path) else list(sources)
    # Not `store_paths` of several: it would report a store that is given twice.
    paths = store_paths(requested) if len(requested) < 2 else requested
    if len(paths) > 1:
        raise UsageError(
            "--to", found=f"{len(paths)} stores", expected="one store, with a separate --out"
        )
    if to == "masks":
        return export_masks(Path(paths[0]), out=Path(out), share=share, progress=display)
    return export_patches(
        Path(paths[0]),
        out=str(out) if is_url(out) else Path(out),
        to=cast(PatchFormat, to),
        shard_patches=shard_patches,
        share=share,
        progress=display,
    )


def _check_options(
    out: str | Path,
    to: str | None,
    index: IndexFormat | None,
    predictions: str | Path | None,
    options: PartOptions,
) -> None:
    """Raise a UsageError if options exclude each other."""
    if (index is None) == (to is None):
        raise UsageError(
            "export", found="both" if index else "neither", expected="one of --index and --to"
        )
    if predictions is not None and to != "h5ad":
        raise UsageError("--predictions", found=f"--to {to}", expected="--to h5ad")
    of_folders = {name for formats in _OF_KIND.values() for name in formats}
    if (index or is_url(out) or to in of_folders) and (options.share != ALL or options.cluster):
        raise UsageError(
            "an option of several machines",
            found="--index" if index else "a URL" if is_url(out) else f"--to {to}",
            expected="patches or masks of a store, in a folder",
        )


_OF_KIND: Mapping[FolderKind, tuple[str, ...]] = {
    FolderKind.RUN: get_args(ModelFormat),
    FolderKind.FEATURES: ("h5ad",),
}
"""Formats of folders that are no stores."""


def _export_folder(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    to: str | None,
    predictions: str | Path | None,
    progress: Progress,
) -> ModelExport | ExportResult | None:
    """Export a run or features. Return None for a format of stores.

    Raises:
        UsageError: the format is not one of the kind of the folder.
    """
    paths = [Path(p) for p in ([sources] if isinstance(sources, str | Path) else sources)]
    kind = folder_kind(paths[0]) if paths else None
    if to == "h5ad" and not kind and any(map(_has_features, paths)):
        kind = FolderKind.FEATURES  # of another tool
    formats = _OF_KIND.get(kind, ()) if kind else ()
    of_folders = [name for of_kind in _OF_KIND.values() for name in of_kind]
    if to in formats and len(paths) == 1 and not is_url(out):
        if kind is FolderKind.RUN:
            return export_model(paths[0], out=Path(out), to=cast(ModelFormat, to))
        of_patches = None if predictions is None else Path(predictions)
        return export_h5ad(paths[0], out=Path(out), predictions=of_patches, progress=progress)
    if to in of_folders or formats:
        raise UsageError(
            f"--to {to}" if to else "--index",
            found=f"{kind or 'no run, and no features'} in {', '.join(map(str, paths))}",
            expected=" or ".join(f"{' or '.join(n)} of one {k}" for k, n in _OF_KIND.items())
            + ", into a local folder",
        )
    return None


def _has_features(folder: Path) -> bool:
    """Return whether a folder has feature files of another tool, and is not one of several folders of features."""
    return any(folder.rglob("*.h5")) and not any(folder.rglob(ENCODER))


def export_index(
    stores: Sequence[Path], *, out: Path, kind: IndexFormat, progress: Progress
) -> IndexResult:
    """Write a table with a row for every patch of the complete slides of stores.

    Columns: `store` (path), `slide`, `patient`, `site`, `label` of the slide; `patch`, the number of the patch in the
    slide; `x_l0`, `y_l0`, its corner, and `size_l0`, its side, in level-0 pixels; `x_level`, `y_level`, `level`, where
    it was read; `mpp`; `tissue` and `focus`, empty if not measured; `bytes`, 0 if unreadable; `annotation`, its class.

    Raises:
        UsageError: the format is unknown, or the file exists.
        NothingToDo: there is no store, or no patch.
        MachineShort: pyarrow, which writes Parquet, is not installed.
    """
    if out.exists():
        raise UsageError(f"{out} exists", todo="remove it, or choose another --out")
    with writable(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        slides = [
            (store, number, record)
            for store in [stack.enter_context(Store(path)) for path in stores]
            for number, record in store.complete.items()
            if record.planned
        ]
        if not slides:
            raise NothingToDo("no patch to export", todo="see `histopipe info`")
        bar = progress.bar("exporting", unit="slides", total=len(slides), detail=True)
        tables = _columns(slides, stack.enter_context(bar))
        with roomy(out.parent), atomic_write(out) as part:
            if kind == "csv":
                rows = (zip(*map(_cells, columns.values()), strict=True) for columns in tables)
                write_table(part, [*_OF_SLIDE, *_OF_PATCH], chain.from_iterable(rows))
            else:
                _write_parquet(part, tables)
    return IndexResult(out, sum(record.planned for _, _, record in slides))


def _columns(slides: Iterable[tuple[Store, int, SlideRecord]], bar: Bar) -> Iterator[Columns]:
    """Yield the columns of each slide, (N,) each."""
    for store, number, record in slides:
        index, count = store.index(number), record.planned
        of_slide = (str(store.path), record.id, record.patient, record.site, record.label)
        side = round(record.side_l0)
        names = np.array([*store.classes, None], object)  # None for -1 and for unknown numbers
        columns = {
            **index,
            **{n: np.full(count, v, object) for n, v in zip(_OF_SLIDE, of_slide, strict=True)},
            "patch": np.arange(count, dtype=np.int32),
            "size_l0": np.full(count, side, np.int32),
            "level": np.full(count, record.level if record.level is not None else -1, np.int16),
            "mpp": np.full(count, record.patch_mpp or np.nan, np.float32),
            "bytes": index["length"],
            "annotation": names[np.clip(index["label"], -1, len(store.classes))],
        }
        yield {name: columns[name] for name in (*_OF_SLIDE, *_OF_PATCH)}
        bar.advance()


def _cells(values: NDArray[Any]) -> list[Any]:
    """Return values for CSV cells. NaN and None are empty."""
    if values.dtype.kind == "f":
        return ["" if v != v else f"{v:.6g}" for v in values.tolist()]  # noqa: PLR0124 - NaN
    return list(values.tolist())


def _write_parquet(path: Path, slides: Iterator[Columns]) -> None:
    with needs_extra(
        "parquet", "Parquet needs pyarrow, which is not installed", ", or use --index csv"
    ):
        import pyarrow as pa  # late: the extra [parquet]
        from pyarrow import parquet
    groups = _row_groups(slides, pa)
    first = next(groups)
    with parquet.ParquetWriter(path, first.schema) as writer:
        for table in chain([first], groups):
            writer.write_table(table, row_group_size=len(table))


def _row_groups(slides: Iterator[Columns], pa: Any) -> Iterator[Any]:
    """Yield Parquet tables of at least `_GROUP_ROWS` rows, except for the last one."""
    waiting: list[Any] = []
    for columns in slides:
        arrays = {
            name: pa.array(
                values, pa.string() if values.dtype == object else None, from_pandas=True
            )
            for name, values in columns.items()
        }
        for name in _OF_SLIDE:  # each text is stored once
            arrays[name] = arrays[name].dictionary_encode()
        waiting.append(pa.table(arrays))
        if sum(map(len, waiting)) >= _GROUP_ROWS:
            yield pa.concat_tables(waiting).unify_dictionaries()
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting).unify_dictionaries()
