"""Tables of predictions: CSV files with a row per patch, slide or patient."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.system.files import atomic_write, path_within, reading
from histopipe.system.grouping import grouped
from histopipe.system.table_files import read_columns, read_dicts, write_table
from histopipe.tasks.choices import SUBSETS, EvaluationLevel, Subset
from histopipe.tasks.predictions import Predictions
from histopipe.tasks.registry import task_of_header

PREDICTIONS = "predictions.csv"
"""Name of the table of a run."""
_PLACES: Mapping[EvaluationLevel, tuple[str, ...]] = {
    "patch": ("slide", "patient", "x_l0", "y_l0"),
    "slide": ("slide", "patient"),
    "patient": ("patient",),
}


def write_predictions(
    path: Path, parts: Sequence[tuple[Mapping[str, object], Predictions]]
) -> None:
    """Write predictions atomically.

    Each of the parts, at least one, has columns with one value for all rows, such as the split.
    """
    common, first = parts[0]
    write_table(
        path,
        [*common, *_PLACES[first.level], *first.task.target_names, *first.task.output_names],
        ([*columns.values(), *row] for columns, predictions in parts for row in _rows(predictions)),
    )


def _rows(predictions: Predictions) -> Iterator[list[object]]:
    columns: dict[str, list[Any]] = {
        "slide": predictions.ids("slide"),
        "patient": predictions.ids("patient"),
        "x_l0": predictions.x_l0.tolist(),
        "y_l0": predictions.y_l0.tolist(),
    }
    for place, target, output in zip(
        zip(*(columns[name] for name in _PLACES[predictions.level]), strict=True),
        predictions.task.target_cells(predictions.target, predictions.output),
        predictions.output.tolist(),
        strict=True,
    ):
        # Nine digits are enough to read back the same float32.
        yield [*place, *target, *(f"{value:.9g}" for value in output)]


def read_predictions(path: Path) -> dict[Subset, Predictions]:
    """Read the predictions of a run by split.

    Raises:
        UsageError: the file does not exist.
        DamagedStore: the file is damaged.
    """
    by_subset = _read(path, by_split=True)
    return {subset: by_subset[subset] for subset in SUBSETS if subset in by_subset}


def read_slide_predictions(path: Path) -> Predictions:
    """Read predictions of one or several slides, without a column for the split. Raise as `read_predictions`."""
    return _read(path, by_split=False)[""]


def _read(path: Path, *, by_split: bool) -> dict[str, Predictions]:
    """Return predictions by split, from the first column; by "" if there is no column for the split."""
    missing = UsageError(f"{path} does not exist", todo="pass the folder of a finished run")
    with reading(path, missing=missing), path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        first, *rest = next(reader)
        header = rest if by_split and first == "split" else [first, *rest]
        tables = {} if by_split else {"": _PredictionRows(header)}
        for row in reader:
            subset, values = (row[0], row[1:]) if by_split else ("", row)
            if subset not in tables:
                tables[subset] = _PredictionRows(header)
            tables[subset].add(values)
        return {subset: rows.predictions() for subset, rows in tables.items()}


class _PredictionRows:
    """Collects the rows of a CSV file into arrays. Raise ValueError if the header has unknown columns."""

    def __init__(self, header: Sequence[str]) -> None:
        self._level, self._places = next(
            (
                (level, names)
                for level, names in _PLACES.items()
                if tuple(header[: len(names)]) == names
            ),
            ("patient", ()),
        )
        self._task = task_of_header(header[len(self._places) :])
        self._columns = len(header)
        self._between = len(self._places), -len(self._task.output_names)
        self._slides: dict[str, int] = {}
        self._patients: dict[str, int] = {}
        self._codes, self._corners = array("i"), array("q")
        self._targets, self._outputs = array("d"), array("f")

    def add(self, row: Sequence[str]) -> None:
        if len(row) != self._columns:
            raise ValueError(f"{len(row)} cells for {self._columns} columns")
        begin, end = self._between
        place = dict(zip(self._places, row, strict=False))
        patient = place["patient"]
        slide = self._slides.setdefault(place.get("slide", patient), len(self._slides))
        self._codes.extend((slide, self._patients.setdefault(patient, len(self._patients))))
        self._corners.extend((int(place.get("x_l0", 0)), int(place.get("y_l0", 0))))
        self._targets.extend(self._task.read_target(row[begin:end]))
        self._outputs.extend(map(float, row[end:]))

    def predictions(self) -> Predictions:
        codes: Any = np.frombuffer(self._codes, np.int32).reshape(-1, 2)
        corners: Any = np.frombuffer(self._corners, np.int64).reshape(-1, 2)
        return Predictions(
            self._task,
            tuple(self._slides),
            tuple(self._patients),
            slide=codes[:, 0],
            patient=codes[:, 1],
            x_l0=corners[:, 0],
            y_l0=corners[:, 1],
            target=np.frombuffer(self._targets, np.float64).reshape(-1, len(self._task.columns)),
            output=np.frombuffer(self._outputs, np.float32).reshape(
                -1, len(self._task.output_names)
            ),
            level=self._level,
        )


FOLDER = "attention"
"""Folder with the table of each bag, in a run or a folder of predictions."""
ATTENTION = "attention"
"""Column of the attention."""
CONTRIBUTION = "contribution_"
"""Prefix of the columns of contributions."""
_PLACE = ("slide", "x_l0", "y_l0", "size_l0")


def patch_value_file(folder: Path, bag: str) -> Path:
    """Return the path of the table of a bag's patches. Raise DamagedStore if it would be outside of the folder."""
    return path_within(folder / FOLDER, f"{bag}.csv")


def write_patch_values(
    folder: Path,
    bag: str,
    places: Iterable[tuple[str, object, object, str]],
    *,
    names: Sequence[str],
    attention: NDArray[np.floating] | None,
    contributions: NDArray[np.floating],
) -> None:
    """Write `attention/BAG.csv` in a folder, with the place and the values of each patch.

    A place is slide, corner and side in level-0 pixels, with empty texts where unknown. Attention is (N,) or unknown,
    contributions are (N, K) for K `names`.

    Raises:
        DamagedStore: the path would be outside of the folder.
    """
    path = patch_value_file(folder, bag)
    path.parent.mkdir(parents=True, exist_ok=True)
    shares = (
        [""] * len(contributions)
        if attention is None
        else [f"{share:.9g}" for share in attention.tolist()]
    )
    values = zip(places, shares, contributions.tolist(), strict=True)
    write_table(
        path,
        [*_PLACE, ATTENTION, *(CONTRIBUTION + name for name in names)],
        ((*place, share, *(f"{value:.6g}" for value in parts)) for place, share, parts in values),
    )


PIXEL_ERRORS = "pixel-errors.npz"
"""File of a run with the masks of the patches with the most wrong pixels."""


@dataclass(frozen=True, slots=True)
class PixelErrors:
    """Patches with wrong pixels.

    Attributes:
        slides: (N,) names of the slides.
        corners: (N, 2) top left corners, level-0 pixels.
        true, predicted: (N, H, W) class numbers; `NOT_ANNOTATED` where nothing is annotated.
    """

    slides: NDArray[np.str_]
    corners: NDArray[np.int64]
    true: NDArray[np.uint8]
    predicted: NDArray[np.uint8]

    def write(self, folder: Path) -> None:
        """Write the file in a folder by one rename."""
        with atomic_write(folder / PIXEL_ERRORS) as part:
            np.savez_compressed(part, allow_pickle=False, **asdict(self))

    @classmethod
    def read(cls, folder: Path) -> PixelErrors | None:
        """Read the file; None if there is none. Raise DamagedStore if it cannot be read."""
        path = folder / PIXEL_ERRORS
        if not path.exists():
            return None
        with reading(path), np.load(path, allow_pickle=False) as saved:
            return cls(**{field.name: saved[field.name] for field in fields(cls)})


UNUSUAL = "unusual"
"""Folder with a table for each slide whose patches have a distance from the training, and its column."""


def write_unusual(
    folder: Path, places: Iterable[Sequence[object]], values: NDArray[np.floating]
) -> None:
    """Write `unusual/SLIDE.csv`: places as for `write_patch_values`, and (N,) distances, of which those above 1 are unusual.

    Raises:
        DamagedStore: a path would be outside of the folder.
    """
    rows = ((*place, f"{value:.4g}") for place, value in zip(places, values.tolist(), strict=True))
    for slide, of_slide in grouped(rows, lambda row: str(row[0])).items():
        path = path_within(folder / UNUSUAL, f"{slide}.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(path, [*_PLACE, UNUSUAL], of_slide)


def patch_value_files(folder: Path) -> list[Path]:
    """Return the tables of patch values in a folder, sorted."""
    return sorted((folder / FOLDER).rglob("*.csv"))


def read_contributions(path: Path) -> list[str]:
    """Return the names of the predictions with contributions in a table."""
    with reading(path):
        columns = read_columns(path)
    return [name.removeprefix(CONTRIBUTION) for name in columns if name.startswith(CONTRIBUTION)]


def read_patch_values(
    paths: Iterable[Path], column: str = ATTENTION, further: Sequence[str] = ()
) -> dict[str, NDArray[np.float64]]:
    """Return (N, 4 + K) x, y, value, side, and `further` columns of patches by slide.

    Patches with unknown position or value are left out. Unknown values of further columns are NaN.

    Raises:
        DamagedStore: a table cannot be read.
    """
    tables: dict[str, NDArray[np.float64]] = {}
    for path in paths:
        rows: dict[str, list[tuple[float, ...]]] = {}
        with reading(path):
            for row in read_dicts(path):
                if row["x_l0"] and row[column]:
                    place, side = (int(row["x_l0"]), int(row["y_l0"])), float(row["size_l0"] or 0)
                    values = (float(row[name] or "nan") for name in further)
                    rows.setdefault(row["slide"], []).append(
                        (*place, float(row[column]), side, *values)
                    )
        tables |= {slide: np.array(values, np.float64) for slide, values in rows.items()}
    return tables


def slides_in_tables(paths: Iterable[Path]) -> dict[str, Path]:
    """Return the table of patch values of each slide: that of its bag."""
    places: dict[str, Path] = {}
    for path in paths:
        with reading(path):
            places |= dict.fromkeys((row["slide"] for row in read_dicts(path)), path)
    return places


def ranks_of(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return (N,) ranks: the share of other values below each. Attention weights differ by orders of magnitude."""
    if len(values) < 2:
        return np.ones(len(values), np.float32)
    return np.asarray(np.searchsorted(np.sort(values), values) / (len(values) - 1), np.float32)
