"""Export the index of stores: a table with a row for every patch, as CSV or Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import ExitCode, NothingToDo, UsageError, needs_extra
from histopipe.store.format import Columns
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.files import atomic_write, roomy, writable
from histopipe.system.output import Bar, Progress, Result, counted
from histopipe.system.table_files import write_table

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


def export_index(stores: Sequence[Path], *, out: Path, to: str, progress: Progress) -> IndexResult:
    """Write a table with a row for every patch of the complete slides of stores.

    Columns: `store` (path), `slide`, `patient`, `site`, `label` of the slide; `patch`, the number of the patch in the
    slide; `x_l0`, `y_l0`, its corner, and `size_l0`, its side, in level-0 pixels; `x_level`, `y_level`, `level`, where
    it was read; `mpp`; `tissue` and `focus`, empty if not measured; `bytes`, 0 if unreadable; `annotation`, its class.

    Raises:
        UsageError: the file exists.
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
