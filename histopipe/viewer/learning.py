"""A classifier that learns while patches are labelled, and the patches to label next.

The classifier is fitted again after each act, in a worker process. Candidates are loaded once, also by worker processes; so
the event loop never waits. Labels of the held-out part measure the classifier; it never learns from them. Only those of
patches that were offered at random count: other ones are chosen, and easier or harder than usual.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import islice, starmap
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool

from histopipe.errors import HistopipeError, UsageError
from histopipe.features.feature_file import features_at
from histopipe.labels.journal import UNSURE, Labels, LabelStudy, PatchPlace
from histopipe.labels.learner import (
    FEWEST_LABELS,
    LinearClassifier,
    QueueOrder,
    contradictions,
    fit_classifier,
    held_out_metrics,
    predict_file,
    queue,
)
from histopipe.system.worker_pool import WorkerDied, silence
from histopipe.tasks.intervals import FEWEST_PATIENTS
from histopipe.viewer.collection import Entry
from histopipe.viewer.guard import NotFound
from histopipe.viewer.layers import OpenSlides, PatchGrid
from histopipe.viewer.patch_map import PatchSample

_MOST_FITTED = 10_000
"""Most labels to which the classifier is fitted; always the same ones of the same labels."""
_OFFERED = 4
"""Of so many patches to label, the last one is of the held-out part, at random."""

Proposal = tuple[PatchPlace, dict[str, Any]]
"""A patch to label, and what is known of it."""


class Learning:
    """The classifier, its accuracy, and the candidates.

    Args:
        slides: the open slides.
        entries: the slides that can be labelled, by id.
        study: classes and held-out patients.
        journal: the labels of the rater.
        message: shows a line in the terminal.
    """

    def __init__(
        self,
        slides: OpenSlides,
        entries: Mapping[str, Entry],
        study: LabelStudy,
        journal: Labels,
        message: Callable[[str], None],
    ) -> None:
        self._slides, self._entries, self._study = slides, entries, study
        self._journal, self._message = journal, message
        files = slides.collection.features
        self.files = {slide: path for slide, path in files.items() if slide in entries}
        self._features: dict[PatchPlace, NDArray[np.float32]] = {}  # of labelled patches
        self._classifier: LinearClassifier | None = None
        self._version, self._learning, self._asked = 0, False, asyncio.Event()
        self._accuracy: dict[str, Any] = {}
        self.sample = PatchSample(slides, entries, message)
        self._held_out: list[bool] = []  # of its patches
        # Of the last pass over all slides: mean probabilities and their largest class, by slide id.
        self.means: dict[str, dict[str, float | str]] = {}
        self._passed = 0
        self._pass: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @cached_property
    def _held_out_slides(self) -> set[str]:
        held_out = {*self._study.held_out}
        return {n for n, entry in self._entries.items() if patient_of(entry) in held_out}

    def start(self) -> None:
        """Start to learn and to load candidates, at the first call. There must be an event loop."""
        if not self._tasks and self.files:
            self._asked.set()
            self._tasks = [asyncio.create_task(self._learn())]
            self.sample.start()

    def ask(self) -> None:
        """Learn from the labels, soon."""
        self.start()
        self._asked.set()

    def summary(self) -> dict[str, Any]:
        """Return the state for the page."""
        return {
            "features": bool(self.files),
            "learning": self._learning,
            "version": self._version,
            "learned": self._classifier is not None,
            "fewest": FEWEST_LABELS,
            "accuracy": self._accuracy,
            "candidates": len(self.sample.patches),
            "loaded": self.sample.loaded,
            "pass": {
                "running": self._pass is not None and not self._pass.done(),
                "slides": self._passed,
                "of": len(self.files),
            },
        }

    def begin_pass(self) -> None:
        """Begin to predict all slides with the current classifier, unless this goes on. Raise NotFound without one."""
        if self._classifier is None:
            raise NotFound("there is no classifier yet")
        if self._pass is None or self._pass.done():
            self._pass = asyncio.create_task(self._predict_all(self._classifier))

    async def _predict_all(self, classifier: LinearClassifier) -> None:
        """Predict slide after slide, but those of held-out patients: predictions would bias their labels."""
        names, self.means, self._passed = self._study.classes, {}, 0
        for slide, path in self.files.items():
            self._passed += 1
            if slide in self._held_out_slides:
                continue
            try:
                _, p = await self._slides.in_worker(predict_file, path, classifier)
            except (HistopipeError, WorkerDied, OSError) as error:
                self._message(f"{slide}: not predicted: {error}")
                continue
            p = p[np.isfinite(p[:, 0])]
            if len(p):
                mean = p.mean(axis=0, dtype=np.float64).tolist()
                best = names[mean.index(max(mean))]
                self.means[slide] = {**dict(zip(names, mean, strict=True)), "predicted": best}

    async def predict(self, entry: Entry) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return (N, 2) corners and (N, C) probabilities of the patches of a slide.

        Raises:
            NotFound: there is no classifier, or the slide has no features.
        """
        if self._classifier is None or entry.id not in self.files:
            raise NotFound("there is no classifier yet, or the slide has no features")
        return await self._slides.in_worker(predict_file, self.files[entry.id], self._classifier)

    def on_map(self, sample: PatchSample, rows: NDArray[np.integer]) -> NDArray[np.floating]:
        """Return (M,) predicted classes of rows of a sample; NaN for held-out patches, whose labels they would bias."""
        if self._classifier is None:
            return np.full(len(rows), np.nan)
        best = self._classifier.predict(sample.features[rows]).argmax(axis=1)
        held_out = [self.is_held_out(*sample.patches[row]) for row in rows.tolist()]
        return np.where(held_out, np.nan, best)

    async def proposals(self, order: QueueOrder, count: int, of_class: int) -> list[Proposal]:
        """Return patches to label next; see `queue`. "contradicted" returns labelled ones."""
        if order == "contradicted":
            return await self._contradicted(count)
        _, references, _ = await run_in_threadpool(self._training)
        rows, held_out = await run_in_threadpool(self._rows_to_label)
        chosen = await run_in_threadpool(
            queue,
            order,
            self.sample.features[: len(self.sample.patches)],
            rows,
            count,
            classifier=self._classifier,
            of_class=of_class,
            references=references,
        )
        proposals: list[Proposal] = []
        offered = iter(held_out.tolist())
        for row in chosen.tolist():
            if (
                len(proposals) % _OFFERED == _OFFERED - 1
                and (at := next(offered, None)) is not None
            ):
                proposals.append(self._proposal(at, offered=True))
            proposals.append(self._proposal(row, offered=False))
        # If no other is left, all are of the held-out part.
        rest = islice(offered, max(0, count - len(proposals)))
        return [*proposals, *(self._proposal(row, offered=True) for row in rest)][:count]

    def is_held_out(self, slide: str, x: int, y: int) -> bool:
        """Return whether a patch is of the held-out part."""
        if not self._study.divided:
            return slide in self._held_out_slides
        entry = self._entries[slide]
        mpp = (entry.record and entry.record.mpp) or 1.0
        return self._study.is_held_out(patient_of(entry), x * mpp, y * mpp)

    def are_held_out(self, entry: Entry, grid: PatchGrid) -> NDArray[np.bool_]:
        """Return (N,) whether the patches of a slide are of the held-out part."""
        places = zip(grid.x.tolist(), grid.y.tolist(), strict=True)
        return np.array([self.is_held_out(entry.id, *place) for place in places], bool)

    async def _learn(self) -> None:
        """Fit the classifier after each act; several acts meanwhile count as one."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._learning = True
            try:
                await self._fit()
            except (HistopipeError, WorkerDied, OSError, ValueError) as error:
                self._message(f"the classifier could not be fitted: {error}")
            self._learning = False

    def _labelled(self) -> tuple[list[PatchPlace], list[PatchPlace]]:
        """Return the patches with a class: those to learn from, and those that measure the classifier."""
        labels = self._journal.labels.copy()
        with_class = [
            patch for patch, label in labels.items() if label != UNSURE and patch[0] in self.files
        ]
        held_out = {patch for patch in with_class if self.is_held_out(*patch)}
        train = [patch for patch in with_class if patch not in held_out]
        train.sort(key=lambda patch: zlib.crc32(repr(patch).encode()))
        test = [patch for patch in held_out if patch in self._journal.offered]
        if self._study.held_out:  # regions of a patient who is also learned from are too easy
            test = [patch for patch in test if self._patient_of(patch) in self._study.held_out]
        return train[:_MOST_FITTED], test

    def _patient_of(self, patch: PatchPlace) -> str:
        return patient_of(self._entries[patch[0]])

    def _arrays(
        self, patches: Iterable[PatchPlace]
    ) -> tuple[list[PatchPlace], NDArray[np.float32], NDArray[np.int64]]:
        """Return the patches with features, (N, D) features and (N,) class numbers."""
        names, labels = self._study.classes, self._journal.labels.copy()
        kept = [
            patch
            for patch in patches
            if patch in self._features
            and np.isfinite(self._features[patch]).all()
            and patch in labels
            and labels[patch] in names
        ]
        features = [self._features[patch] for patch in kept]
        numbers = np.array([names.index(labels[patch]) for patch in kept], np.int64)
        return kept, np.array(features, np.float32), numbers

    def _training(self) -> tuple[list[PatchPlace], NDArray[np.float32], NDArray[np.int64]]:
        """Return the patches to learn from, with features and class numbers."""
        return self._arrays(self._labelled()[0])

    async def _fit(self) -> None:
        train, test = await run_in_threadpool(self._labelled)
        missing: dict[str, list[PatchPlace]] = {}
        for patch in (*train, *test):
            if patch not in self._features:
                missing.setdefault(patch[0], []).append(patch)
        for slide, patches in missing.items():
            corners = np.array([patch[1:] for patch in patches])
            try:
                values = await self._slides.in_worker(features_at, self.files[slide], corners)
                self.sample.width = self.sample.width or values.shape[1]
                if values.shape[1] != self.sample.width:
                    raise UsageError(
                        "length of features", found=values.shape[1], expected=self.sample.width
                    )
            except (HistopipeError, WorkerDied, OSError) as error:
                self._message(f"{slide}: nothing is learned from its labels: {error}")
                values = np.full((len(patches), 1), np.nan, np.float32)
            self._features.update(zip(patches, values, strict=True))
        _, features, numbers = await run_in_threadpool(self._arrays, train)
        classifier = None
        if len(numbers) >= FEWEST_LABELS and len(np.unique(numbers)) > 1:
            classifier = await self._slides.in_worker(
                fit_classifier, features, numbers, len(self._study.classes)
            )
        self._classifier = classifier  # until then, the page has the one before
        tested, features, numbers = await run_in_threadpool(self._arrays, test)
        self._accuracy = await run_in_threadpool(self._measured, tested, features, numbers)
        self._version += 1

    def _measured(
        self, patches: list[PatchPlace], features: NDArray[np.float32], numbers: NDArray[np.int64]
    ) -> dict[str, Any]:
        """Return how the classifier does on the held-out part: counts, and metrics where there are enough patients."""
        names, study = self._study.classes, self._study
        patients = np.array([self._patient_of(patch) for patch in patches])
        by_class = [len(np.unique(patients[numbers == number])) for number in range(len(names))]
        result: dict[str, Any] = {
            "patches": len(patches),
            "patients": len(np.unique(patients)),
            "patches_by_class": np.bincount(numbers, minlength=len(names)).tolist(),
            "patients_by_class": by_class,
            "by_region": bool(study.divided and not study.held_out),
            "fewest": FEWEST_PATIENTS,
            "metrics": {},
        }
        if self._classifier is None or not len(patches):
            return result
        output = self._classifier.predict(features)
        right = output.argmax(axis=1) == numbers
        result["right_by_class"] = np.bincount(numbers, right, len(names)).astype(int).tolist()
        few = result["patients"] < FEWEST_PATIENTS or min(by_class) < 2
        if few and not (result["by_region"] and min(by_class)):
            return result
        metrics = held_out_metrics(names, numbers, output, patients)
        for name in ("balanced_accuracy", "auc"):
            value = metrics.values.get(name)
            if value is not None:
                result["metrics"][name] = [value, metrics.intervals.get(name)]
        return result

    def _rows_to_label(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of candidates without a label, in random order: those to learn from, and those held out.

        Held-out ones with a label that was not asked for, such as an imported one, count only when they are offered.
        """
        labels, patches, before = self._journal.labels.copy(), self.sample.patches, self._held_out
        # Not in place: there may be another request.
        flags = self._held_out = [*before, *starmap(self.is_held_out, patches[len(before) :])]
        free = [
            patch not in labels or (is_held_out and patch not in self._journal.offered)
            for patch, is_held_out in zip(patches, flags, strict=False)
        ]
        order = np.random.default_rng(self._study.seed).permutation(len(free))
        order = order[np.array(free, bool)[order]]
        held_out = np.array(flags, bool)[order]
        # One of each patient in turn, so that there are soon labels of several.
        seen = Counter[str]()
        turns = []
        for row in order[held_out].tolist():
            patient = self._patient_of(patches[row])
            turns.append(seen[patient])
            seen[patient] += 1
        return order[~held_out], order[held_out][np.argsort(turns, kind="stable")]

    def _proposal(self, row: int, *, offered: bool) -> Proposal:
        patch = self.sample.patches[row]
        if self._classifier is None or offered:  # a prediction would bias the label
            return patch, {"offered": offered}
        (p,) = self._classifier.predict(self.sample.features[row : row + 1])
        predicted = self._study.classes[int(p.argmax())]
        return patch, {"predicted": predicted, "p": round(float(p.max()), 3)}

    async def _contradicted(self, count: int) -> list[Proposal]:
        """Return the labelled patches whose class is the least probable for classifiers of other patients."""
        patches, features, numbers = await run_in_threadpool(self._training)
        if len(np.unique(numbers)) < 2:
            return []
        # Of a single patient: each patch by classifiers of other patches.
        groups = [
            repr(patch) if self._study.divided else self._patient_of(patch) for patch in patches
        ]
        p = await self._slides.in_worker(contradictions, features, numbers, np.array(groups))
        rows = np.argsort(np.nan_to_num(p, nan=2.0), kind="stable")[:count]
        return [
            (patches[row], {"label": self._study.classes[numbers[row]], "p": float(p[row])})
            for row in rows.tolist()
            if p[row] < 0.5
        ]


def prepare_to_learn() -> None:
    """Prepare workers that learn: each would load scikit-learn for its first classifier, for seconds."""
    silence()
    with suppress(ImportError):  # `open_labelling` reports it
        import sklearn.linear_model  # noqa: F401


def patient_of(entry: Entry) -> str:
    """Return the patient of a slide; the slide itself, if it has none."""
    return (entry.record and entry.record.patient) or entry.id
