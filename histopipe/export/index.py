"""A store's patches as a table, one row each, written slide by slide: CSV, or Parquet."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.selection import store_paths
from histopipe.errors import MachineShort, NothingToDo, UsageError
from histopipe.runs import folder as run_folder
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.files import appearing
from histopipe.system.filesystems import is_full_disk
from histopipe.system.progress import Bar, default_progress

IndexFormat = Literal["csv", "parquet"]

_OF_SLIDE = ("store", "slide", "patient", "site", "label")
_OF_PATCH = (
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
"""Rows of a Parquet row group, at least: what readers take at once."""

Columns = dict[str, Any]


def export_index(
    stores: str | Path | Sequence[str | Path], *, out: str | Path, kind: IndexFormat | None = None
) -> int:
    """Write a row for every patch of the complete slides of stores.

    Columns: `store` (path), `slide`, `patient`, `site`, `label` of its slide; `patch`, its number there; `x_l0`, `y_l0` its corner
    and `size_l0` its side in level-0 pixels; `x_level`, `y_level` and `level` as it was read; `mpp` as stored; `tissue` and `focus`,
    empty where not measured; `bytes` as stored, 0 for a patch that could not be read; `annotation`, its own class.

    Args:
        stores: a store, or several.
        out: the file.
        kind: "csv" or "parquet"; by the file's suffix if not given.

    Returns:
        How many rows.

    Raises:
        UsageError: neither CSV nor Parquet, or the file is there.
        NothingToDo: no store, or no patch.
        MachineShort: pyarrow, which writes Parquet, is not installed.
    """
    path = Path(out)
    kind = kind or path.suffix.removeprefix(".")  # type: ignore[assignment]  # checked below
    if kind not in get_args(IndexFormat):
        raise UsageError("--index", found=repr(kind), expected=" or ".join(get_args(IndexFormat)))
    if path.exists():
        raise UsageError(f"{path} exists", todo="remove it, or choose another --out")
    with run_folder.writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    opened = [Store(one) for one in store_paths(stores)]
    try:
        count = sum(r.planned for store in opened for r in store.complete.values())
        if not count:
            raise NothingToDo("no patch to export", todo="see `histopipe info`")
        progress = default_progress().bar(
            "exporting",
            unit="slides",
            total=sum(len(store.complete) for store in opened),
            detail=True,
        )
        try:
            with appearing(path) as part:
                write = _write_csv if kind == "csv" else _write_parquet
                write(part, _slides(opened, progress))
        except OSError as error:
            if not is_full_disk(error):
                raise
            raise MachineShort(f"the disk that holds {path} is full", todo="make room") from error
        finally:
            progress.close()
    finally:
        for store in opened:
            store.close()
    return count


def _slides(stores: Sequence[Store], progress: Bar) -> Iterator[tuple[Columns, Columns]]:
    """Of each slide: what its rows have in common, and the columns in which they differ, (N,) each."""
    for store in stores:
        for number, record in store.complete.items():
            if record.planned:
                yield _common(store, record), _columns(store, number, record)
            progress.advance()


def _common(store: Store, record: SlideRecord) -> Columns:
    values = (str(store.path), record.id, record.patient, record.site, record.label)
    return dict(zip(_OF_SLIDE, values, strict=True))


def _columns(store: Store, number: int, record: SlideRecord) -> Columns:
    index, count = store.index(number), record.planned
    side = round((record.read_size or 0) * (record.downsample or 0))
    names = np.array([*store.classes, None], object)  # none comes for -1, and for what is not there
    labels = np.clip(index["label"], -1, len(store.classes))
    found = {
        "patch": np.arange(count, dtype=np.int32),
        "size_l0": np.full(count, side, np.int32),
        "level": np.full(count, record.level if record.level is not None else -1, np.int16),
        "mpp": np.full(count, record.patch_mpp or np.nan, np.float32),
        "bytes": index["length"],
        "annotation": names[labels],
    }
    return {name: found[name] if name in found else index[name] for name in ("patch", *_OF_PATCH)}


def _write_csv(path: Path, slides: Iterator[tuple[Columns, Columns]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*_OF_SLIDE, "patch", *_OF_PATCH])
        for common, columns in slides:
            cells = [_cells(values) for values in columns.values()]
            first = ["" if value is None else value for value in common.values()]
            writer.writerows([*first, *row] for row in zip(*cells, strict=True))


def _cells(values: NDArray[Any]) -> list[Any]:
    """Values as they are written: what is not known is empty."""
    if values.dtype.kind == "f":
        return ["" if v != v else f"{v:.6g}" for v in values.tolist()]  # noqa: PLR0124 - NaN
    return ["" if v is None else v for v in values.tolist()]


def _write_parquet(path: Path, slides: Iterator[tuple[Columns, Columns]]) -> None:
    try:
        import pyarrow as pa  # late: the extra [parquet]
        from pyarrow import parquet
    except ImportError as error:
        raise MachineShort(
            "Parquet needs pyarrow, which is not installed", found=str(error),
            todo="pip install 'histopipe[parquet]', or take --index csv",
        ) from error  # fmt: skip
    writer, waiting = None, []
    for common, columns in slides:
        count = len(columns["patch"])
        arrays = {
            # One text and so many references to it.
            **{
                name: pa.array(np.full(count, value, object), pa.string()).dictionary_encode()
                for name, value in common.items()
            },
            **{
                name: pa.array(values, pa.string() if values.dtype == object else None, from_pandas=True)
                for name, values in columns.items()
            },
        }  # fmt: skip
        waiting.append(pa.table(arrays))
        if sum(map(len, waiting)) >= _GROUP_ROWS:
            writer = _append(writer, path, waiting, pa, parquet)
            waiting = []
    if waiting:
        writer = _append(writer, path, waiting, pa, parquet)
    if writer is not None:
        writer.close()


def _append(writer: Any, path: Path, tables: Sequence[Any], pa: Any, parquet: Any) -> Any:
    table = pa.concat_tables(tables).unify_dictionaries()
    writer = writer or parquet.ParquetWriter(path, table.schema)
    writer.write_table(table, row_group_size=len(table))
    return writer
