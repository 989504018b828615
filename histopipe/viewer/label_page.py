"""Labelling in the viewer: the journal of the rater, a classifier that learns meanwhile, and the patches to label next.

An act is written to the journal before its answer. Then the classifier is fitted again, in a worker process. The candidates
for the queue are loaded once, also by worker processes; so the event loop never waits.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from histopipe.errors import HistopipeError, UsageError
from histopipe.labels.agreement import cohens_kappa, disagreements
from histopipe.labels.journal import (
    MOST_PATCHES,
    UNSURE,
    Journal,
    LabelStudy,
    PatchPlace,
    check_rater,
    open_study,
    raters_of,
    read_labels,
    read_study,
    write_subsets,
)
from histopipe.labels.learner import (
    ORDERS,
)
from histopipe.runs.run import open_source
from histopipe.splits.splits import patches_crc
from histopipe.system.files import roomy, run_on_error, writable
from histopipe.system.output import counted
from histopipe.system.table_cells import cell_number
from histopipe.system.table_files import read_table
from histopipe.viewer.collection import ChangedMeanwhile, Collection, Entry
from histopipe.viewer.guard import NotFound, read_json_body
from histopipe.viewer.layers import OpenSlides, item
from histopipe.viewer.learning import Learning, patient_of
from histopipe.viewer.options import ViewOptions
from histopipe.viewer.patch_map import PatchSample

_MOST_BYTES = 8 << 20
"""Most bytes of an act."""
_MOST_LISTED = 200
"""Most patches of a list."""


class LabelPage:
    """Answers what the page asks to label patches.

    Args:
        slides: the open slides.
        journal: the journal of the rater.
        study: classes and held-out patients.
        message: shows a line in the terminal.

    Raises:
        UsageError: two stores have the same slide, or a slide has other patches than those that were labelled.
    """

    def __init__(
        self,
        slides: OpenSlides,
        journal: Journal,
        study: LabelStudy,
        message: Callable[[str], None],
    ) -> None:
        self._slides, self._journal, self._study = slides, journal, study
        self._entries = complete_entries(slides.collection)
        self._numbers = {entry: n for n, entry in enumerate(slides.collection.entries)}
        check_patches(self._entries, journal.crcs)
        self._writing = asyncio.Lock()
        # A page may send acts that were made before a restart: for these slides, this rater and this folder only.
        names = [entry.name for entry in slides.collection.entries]
        self._session = f"{zlib.crc32(repr((names, str(journal.path.resolve()))).encode()):08x}"
        self._learning = Learning(slides, self._entries, study, journal, message)
        self.sample = self._learning.sample

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/labels", self._state),
            Route("/labels", self._act, methods=["POST"]),
            Route("/labelled", self._by_slide),
            Route("/queue", self._queue),
            Route("/disagreements", self._disagreements),
            Route("/pass", self._pass, methods=["GET", "POST"]),
        ]

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    async def of_slide(self, _: Request, entry: Entry) -> Response:
        """Return (N,) float32 numbers of the labels of a slide's patches: classes, then "unsure"; NaN for none."""
        corners = await self._corners_of(entry)
        # A copy: another thread may add labels meanwhile.
        patches = [patch for patch in self._journal.labels.copy() if patch[0] == entry.id]
        values = np.full(len(corners.x), np.nan, np.float32)
        x, y = np.array([patch[1:] for patch in patches], np.int64).reshape(-1, 2).T
        rows = corners.rows_at(x, y)
        values[rows[rows >= 0]] = np.array([self._number_of(patch) for patch in patches])[rows >= 0]
        return Response(values.astype("<f4").tobytes(), media_type="application/octet-stream")

    async def learned(self, _: Request, entry: Entry) -> Response:
        """Return (2, N) float32: the class that the classifier gives to each patch, and its probability; NaN for none."""
        corners = await self._corners_of(entry)
        places, p = await self._learning.predict(entry)
        rows = corners.rows_at(*places.T)
        values = np.full((2, len(corners.x)), np.nan, np.float32)
        best = np.where(np.isnan(p[:, 0]), np.nan, p.argmax(axis=1))
        values[:, rows[rows >= 0]] = np.stack([best, p.max(axis=1)])[:, rows >= 0]
        # A prediction would bias the labels that measure it.
        values[:, await run_in_threadpool(self._learning.are_held_out, entry, corners)] = np.nan
        return Response(values.astype("<f4").tobytes(), media_type="application/octet-stream")

    def on_map(
        self, key: str, sample: PatchSample, rows: NDArray[np.integer]
    ) -> NDArray[np.floating] | None:
        """Return (M,) values of rows of a sample: numbers of labels or of predicted classes; None for other layers."""
        if key == "mine":
            return np.array([self._number_of(sample.patches[row]) for row in rows.tolist()])
        return self._learning.on_map(sample, rows) if key == "learned" else None

    async def _corners_of(self, entry: Entry) -> Any:
        if self._entries.get(entry.id) is not entry:
            raise NotFound(f"{entry.name} has no patches to label")
        return (await self._slides.layers_of(entry)).grids[0]

    def _number_of(self, patch: PatchPlace) -> float:
        label = self._journal.labels.get(patch)
        return np.nan if label is None else [*self._study.classes, UNSURE].index(label)

    async def _state(self, _: Request) -> Response:
        self._learning.start()
        return JSONResponse(self._summary())

    async def _by_slide(self, _: Request) -> Response:
        """Return the number of labels of each slide that has some, and the marked slides; slides by their numbers."""
        counts, marks = self._journal.by_slide.copy(), self._journal.marks.copy()
        labelled = {
            self._numbers[entry]: counts[slide]
            for slide, entry in self._entries.items()
            if counts[slide]
        }
        marked = [number for entry, number in self._numbers.items() if entry.id in marks]
        return JSONResponse({"labelled": labelled, "marked": marked})

    def _summary(self) -> dict[str, Any]:
        journal = self._journal
        counts = Counter(journal.labels.copy().values())
        return {
            "rater": journal.rater,
            "raters": raters_of(journal.path.parent),
            "classes": self._study.classes,
            "unsure": UNSURE,
            "acts": journal.count,
            "session": self._session,
            "counts": [counts[name] for name in (*self._study.classes, UNSURE)],
            "undo": journal.can_undo,
            "redo": journal.can_redo,
            **self._learning.summary(),
            "orders": ORDERS,
        }

    async def _act(self, request: Request) -> Response:
        """Write an act to the journal. The answer has the new label of each patch that has changed."""
        body = await read_json_body(request, _MOST_BYTES)
        act = await self._checked(body)
        async with self._writing:
            changed = await run_in_threadpool(self._journal.add, act)
        if act["act"] != "mark":
            self._learning.ask()
        rows = [
            [self._numbers[self._entries[slide]], x, y, None if np.isnan(value) else value]
            for slide, x, y in changed
            if slide in self._entries
            for value in [self._number_of((slide, x, y))]
        ]
        return JSONResponse({**self._summary(), "changed": rows})

    async def _checked(self, body: bytes | bytearray) -> dict[str, Any]:
        """Return the act of a request, with slides by id. Its patches exist."""
        try:
            value = json.loads(body)
            act = {name: value[name] for name in ("id", "act")}
            if value["session"] != self._session:
                raise ChangedMeanwhile(
                    "the viewer was started again with another rater, folder or slides"
                )
            entries = self._slides.collection.entries
            if act["act"] == "mark":
                number, marked = value["slide"], value["marked"]
                if type(number) is not int or number < 0:
                    raise UsageError("slide", found=str(number)[:100], expected="its number")
                return {**act, "slide": item(entries, number).id, "marked": marked}
            if act["act"] != "label":
                return act
            table = np.array(value["patches"]).reshape(-1, 3)
            if table.dtype.kind != "i":
                raise UsageError("patches", expected="slide number, x and y")
            numbers, *places = table.T
            from_sheet = {*map(tuple, value.get("offered", []))}
            patches: list[list[Any]] = []
            offered: list[list[Any]] = []
            for number in np.unique(numbers.astype(np.uint64)).tolist():
                entry, of_slide = item(entries, number), numbers == number
                corners = await self._corners_of(entry)
                x, y = (place[of_slide] for place in places)
                if (corners.rows_at(x, y) < 0).any():
                    raise NotFound(f"{entry.name} has no such patch")
                places_of = [*zip(x.tolist(), y.tolist(), strict=True)]
                patches += [[entry.id, *at] for at in places_of]
                offered += [[entry.id, *at] for at in places_of if (number, *at) in from_sheet]
        except (
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            if isinstance(error, HistopipeError):
                raise
            raise UsageError("the request is not an act", found=repr(error)[:100]) from error
        slides = {patch[0] for patch in patches} - self._journal.crcs.keys()
        return {
            **act,
            "class": value.get("class"),
            "offered": [patch for patch in offered if self._learning.is_held_out(*patch)],
            "patches": patches,
            "crcs": {slide: _crc(self._entries[slide]) for slide in sorted(slides)},
        }

    async def _queue(self, request: Request) -> Response:
        """Return the patches to label next: `?order=uncertain&class=0&count=24`; some are of the held-out part."""
        query = request.query_params
        order, text, number = query.get("order"), query.get("count", "24"), query.get("class", "0")
        if order not in ORDERS or not text.isdecimal() or not number.isdecimal():
            raise UsageError("queue", found=str(query)[:100], expected="order, class and count")
        count, of_class = min(int(text[:4]), _MOST_LISTED), int(number[:4])
        if of_class >= len(self._study.classes):
            raise NotFound(f"there is no class {of_class}")
        proposals = await self._learning.proposals(order, count, of_class)
        return JSONResponse([self._listed(patch, **values) for patch, values in proposals])

    def _patient_of(self, slide: str) -> str:
        return patient_of(self._entries[slide]) if slide in self._entries else slide

    def _listed(self, patch: PatchPlace, **values: Any) -> dict[str, Any]:
        slide, x, y = patch
        entry = self._entries[slide]
        place = {"slide": entry.name, "number": self._numbers[entry], "x": x, "y": y}
        return {**place, "size": entry.side_l0, **values}

    async def _pass(self, request: Request) -> Response:
        """Begin to predict all slides (POST), or return their mean probabilities so far, in the form of `/metrics`."""
        if request.method == "POST":
            self._learning.begin_pass()
        return JSONResponse({"slides": self._learning.means, "split": {}})

    async def _disagreements(self, request: Request) -> Response:
        """Return the agreement with another rater: kappa, and the patches with different labels."""
        other, journal = request.query_params.get("rater", ""), self._journal
        classes = read_study(journal.path.parent).classes  # the other rater may have new ones
        labels = await run_in_threadpool(read_labels, journal.path.parent, other, classes)
        check_patches(self._entries, labels.crcs)
        mine = journal.labels.copy()
        kappa = await run_in_threadpool(
            cohens_kappa, mine, labels.labels, classes, self._patient_of
        )
        names = disagreements({journal.rater: mine, other: labels.labels})
        rows = [
            self._listed(patch, labels=of_raters)
            for patch, of_raters in sorted(names.items())
            if patch[0] in self._entries
        ]
        values = {name: getattr(kappa, name) for name in kappa.__dataclass_fields__}
        return JSONResponse({**values, "disagreements": len(names), "list": rows[:_MOST_LISTED]})


def open_labelling(
    slides: OpenSlides, options: ViewOptions, message: Callable[[str], None]
) -> LabelPage | None:
    """Open the journal of the options; None without one.

    Raises:
        UsageError: the folder cannot be written; and as `open_study`, `Journal` and `LabelPage`.
        MachineShort: the disk is full.
        DamagedStore: the journal cannot be read.
    """
    if options.journal is None:
        return None
    if slides.collection.features and find_spec("sklearn") is None:
        raise UsageError(
            "--journal with --features",
            found="no scikit-learn, which learns from the labels",
            todo="pip install 'histopipe[train]', or leave out --features",
        )
    check_rater(options.rater or "")
    folder, entries = Path(options.journal), complete_entries(slides.collection)
    patients = {slide: patient_of(entry) for slide, entry in entries.items()}
    with roomy(folder), writable(folder):
        study = open_study(folder, patients.values(), classes=options.classes, seed=options.seed)
        write_subsets(folder, study, patients)
        journal = Journal(folder, options.rater or "", study.classes)
    if options.import_labels is not None:
        with run_on_error(journal.close), roomy(folder):
            message(_import_labels(journal, study, entries, Path(options.import_labels)))
    if study.seed != options.seed:
        message(f"the held-out patients of {folder} are those of --seed {study.seed}")
    with run_on_error(journal.close):
        return LabelPage(slides, journal, study, message)


def complete_entries(collection: Collection) -> dict[str, Entry]:
    """Return the complete slides of the stores by id.

    Raises:
        UsageError: there is none, or two stores have the same slide.
    """
    complete = [entry for entry in collection.entries if entry.complete]
    entries = {entry.id: entry for entry in complete}
    if not entries or len(entries) < len(complete):
        raise UsageError(
            "--journal",
            found="two stores with the same slide" if entries else "no store with complete slides",
            expected="one store",
        )
    return entries


_PLACE, _CLASS = ("slide", "x_l0", "y_l0"), ("class", "annotation", "predicted")
"""Columns of a table of labels; the first one of those with a class counts."""


def _import_labels(
    journal: Journal, study: LabelStudy, entries: Mapping[str, Entry], path: Path
) -> str:
    """Add the labels of a table to a journal, of patches that were never labelled there. Return what was added, as text.

    Raises:
        UsageError: columns are missing, or a class or a patch is not there. Then nothing is added.
    """
    corners: dict[str, set[tuple[int, int]]] = {}
    patches: dict[str, list[list[Any]]] = {}
    for where, name, slide, x, y in _predicted(path) if path.is_dir() else _labelled(path):
        if slide not in entries or not name:
            continue
        if slide not in corners:
            corners[slide] = _corners(entries[slide])
        if name not in (*study.classes, UNSURE) or (x, y) not in corners[slide]:
            raise UsageError(
                f"{path}, {where}",
                found=f"{name} at {x:g}, {y:g}",
                expected=f"{', '.join(study.classes)} or {UNSURE}, and the corner of a patch",
            )
        if (slide, x, y) not in journal.earlier:
            patches.setdefault(name, []).append([slide, int(x), int(y)])
    added = 0
    for name, of_class in patches.items():
        for first in range(0, len(of_class), MOST_PATCHES):
            some = of_class[first : first + MOST_PATCHES]
            slides = {slide for slide, *_ in some} - journal.crcs.keys()
            crcs = {slide: _crc(entries[slide]) for slide in sorted(slides)}
            act = {"id": secrets.token_hex(12), "act": "label", "class": name}
            added += len(journal.add({**act, "patches": some, "crcs": crcs}))
    return f"{counted(added, 'label')} of {path} added"


def _labelled(path: Path) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield line, class, slide and corner of the rows of a table."""
    table = read_table(path, columns=_PLACE)
    column = next((name for name in _CLASS if name in table.columns), _CLASS[0])
    if {*_PLACE, column} - {*table.columns}:
        raise UsageError(
            f"{path}: columns",
            found=", ".join(table.columns),
            expected=f"{', '.join(_PLACE)}, and {' or '.join(_CLASS)}",
        )
    for line, cells in table.rows:
        row = dict(zip(table.columns, cells, strict=True))
        x, y = map(cell_number, (row["x_l0"], row["y_l0"]))
        yield f"line {line}", row[column], row["slide"], x, y


def _predicted(folder: Path) -> Iterator[tuple[str, str, str, float, float]]:
    """Yield slide, predicted class, slide and corner of the patches in a folder of predictions, or a run."""
    source = open_source(folder)
    for slide in source.slide_ids():
        scores = source.of_slide(slide)
        if scores is not None and source.classes:
            best = np.where(np.isnan(scores.output[:, 0]), -1, scores.output.argmax(axis=1))
            names = *source.classes, ""  # of patches without a prediction
            for number, x, y in zip(best, scores.x_l0.tolist(), scores.y_l0.tolist(), strict=True):
                yield slide, names[number], slide, x, y


def _corners(entry: Entry) -> set[tuple[int, int]]:
    assert entry.store is not None  # noqa: S101 - it is complete
    index = entry.store.index(entry.number)
    return {*zip(index["x_l0"].tolist(), index["y_l0"].tolist(), strict=True)}


def _crc(entry: Entry) -> int:
    assert entry.store is not None  # noqa: S101 - it is complete
    return patches_crc(entry.store, entry.number)


def check_patches(entries: Mapping[str, Entry], crcs: Mapping[str, int]) -> None:
    """Check that slides have the patches that were labelled.

    Raises:
        UsageError: a slide has others: it was ingested again, or the store has another grid.
    """
    for slide, crc in crcs.items():
        if slide in entries and _crc(entries[slide]) != crc:
            raise UsageError(
                "--journal",
                found=f"other patches of {slide} than those that were labelled",
                expected="the store with which the journal was begun",
                todo="use that store, or another folder for the journal",
            )
