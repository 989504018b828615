"""Export stores (patches, index, tissue masks), the model of a run, or features, for other programs.

The index is a table with a row for every patch, as CSV or Parquet. The other formats have modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.selection import store_paths
from histopipe.errors import ExitCode, NothingToDo, UsageError, needs_extra
from histopipe.exporting.export_formats import (
    EXPORTS,
    ExportFormat,
    ExportOptions,
    flag_text,
    formats_by_source,
)
from histopipe.exporting.exported_models import ModelExport
from histopipe.exporting.patches import ExportResult
from histopipe.store.format import STAIN_COLUMNS, Columns
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.cluster_parts import on_cluster
from histopipe.system.files import atomic_write, make_folder, roomy
from histopipe.system.folders import ENCODER, FolderKind, folder_kind
from histopipe.system.output import Bar, Progress, Result, counted, default_progress
from histopipe.system.settings import declared_settings, make_settings, takes
from histopipe.system.shared_folders import ALL
from histopipe.system.table_files import write_table
from histopipe.system.urls import is_url
from histopipe.tiling.mask_files import TissueReport

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
    *STAIN_COLUMNS,
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


def export_index(stores: Sequence[Path], *, out: Path, to: str, progress: Progress) -> IndexResult:
    """Write a table with a row for every patch of the complete slides of stores.

    Columns: `store` (path), `slide`, `patient`, `site`, `label` of the slide; `patch`, the number of the patch in the
    slide; `x_l0`, `y_l0`, its corner, and `size_l0`, its side, in level-0 pixels; `x_level`, `y_level`, `level`, where
    it was read; `mpp`; `tissue` and `focus`, empty if not measured; `bytes`, 0 if unreadable; `annotation`, its class;
    and the amounts of stains, empty if not measured.

    Raises:
        UsageError: the file exists.
        NothingToDo: there is no store, or no patch.
        MachineShort: pyarrow, which writes Parquet, is not installed.
    """
    if out.exists():
        raise UsageError(f"{out} exists", todo="remove it, or choose another --out")
    make_folder(out.parent)
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
            if to == "csv":
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
            **{name: np.full(count, np.nan, np.float32) for name in STAIN_COLUMNS},
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


@takes(declared_settings(ExportOptions))
def export(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> ExportResult | IndexResult | TissueReport | ModelExport:
    """Export the index, the patches or the tissue masks of stores, the model of a run, or features.

    Args:
        sources: one or several stores; a run; or a folder of features. Patches can be exported from one store only, and are
            neither decoded nor encoded.
        out: file of the index, or folder of the patches. Files that already exist in the folder are kept. With some formats
            also a URL: s3://, gs:// or az://.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe export`. Of a run see
            `export_model`, of features `export_h5ad`.

    Returns:
        The files and the number of patches written.

    Raises:
        UsageError: both or neither of `to` and `index` are given, `out` has other content, or the format is not one of the
            kind of the folder, or does not take an option.
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
    options, display = make_settings(ExportOptions, settings), progress or default_progress()
    to, index = options.to, options.index
    name = to or index
    if name is None or (to and index):
        raise UsageError(
            "export", found="both" if index else "neither", expected="one of --index and --to"
        )
    chosen, flag = EXPORTS[name], f"--to {to}" if to else f"--index {index}"
    if options.predictions is not None and "predictions" not in chosen.options:
        raise UsageError("--predictions", found=flag, expected=flag_text("predictions"))
    if (options.share != ALL or options.cluster) and (is_url(out) or "share" not in chosen.options):
        raise UsageError(
            "an option of several machines",
            found=flag if "share" not in chosen.options else "a URL",
            expected="patches or masks of a store, in a folder",
        )
    paths = [Path(p) for p in ([sources] if isinstance(sources, str | Path) else sources)]
    _check_source(flag, chosen, paths)
    if options.cluster:
        return on_cluster(export, sources, out, progress=display, **settings)
    if is_url(out) and "url" not in chosen.options:
        raise UsageError(
            f"{flag} with a URL",
            expected=f"a local path, or {flag_text('url')}",
            todo="export to a local folder, and copy it",
        )
    if chosen.source is FolderKind.STORE and (index or len(paths) < 2):
        paths = store_paths(sources)
    # Not of several for `to`: `store_paths` would report a store that is given twice.
    if to and len(paths) > 1:
        raise UsageError(
            "--to", found=f"{len(paths)} stores", expected="one store, with a separate --out"
        )
    result: ExportResult | IndexResult | TissueReport | ModelExport = chosen.write(
        paths if index else paths[0],
        out=str(out) if is_url(out) else Path(out),
        to=name,
        shard_patches=options.shard_patches,
        predictions=None if options.predictions is None else Path(options.predictions),
        share=options.share,
        progress=display,
    )
    return result


def _check_source(flag: str, chosen: ExportFormat, paths: Sequence[Path]) -> None:
    """Raise a UsageError if a folder is not of the kind that the format exports."""
    kind = folder_kind(paths[0]) if paths else None
    if chosen.source is FolderKind.FEATURES and not kind and any(map(_has_features, paths)):
        kind = FolderKind.FEATURES  # of another tool
    _, *of_folders = formats_by_source().items()  # the first is of stores
    is_other = kind is not chosen.source or len(paths) != 1
    if kind in dict(of_folders) if chosen.source is FolderKind.STORE else is_other:
        raise UsageError(
            flag,
            found=f"{kind or 'no run, and no features'} in {', '.join(map(str, paths))}",
            expected=f"{chosen.source} for {flag}"
            + "".join(f"; {of}: {' or '.join(names)}" for of, names in of_folders),
        )


def _has_features(folder: Path) -> bool:
    """Return whether a folder has feature files of another tool, and is not one of several folders of features."""
    return any(folder.rglob("*.h5")) and not any(folder.rglob(ENCODER))
