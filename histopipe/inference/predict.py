"""What a run's model says of slides: read from stores, or straight from the slides' files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.dataset.options import check_whole
from histopipe.dataset.selection import store_paths
from histopipe.dataset.splits import trained_on
from histopipe.errors import DamagedStore, Interrupted, NothingToDo, SlideError, UsageError
from histopipe.evaluation.scores import AGGREGATIONS, Aggregation, Level, PatchScores
from histopipe.features.folder import hold_against
from histopipe.geometry import Mpp
from histopipe.inference.classifier import Classifier, check_scale, load_classifier
from histopipe.inference.predict_options import PredictOptions, files_spec
from histopipe.inference.predict_result import Predicted
from histopipe.inference.predict_summary import judged, write_summary
from histopipe.inference.predictions_folder import (
    ABOUT,
    PATIENTS,
    SLIDES,
    PredictionFolder,
    is_prediction,
)
from histopipe.inference.slide_files import OpenedSlide, SlideFiles, source_of
from histopipe.inference.slide_info import SlideFacts
from histopipe.inference.stored_slides import StoredSlide, stored_slides
from histopipe.inference.stream import PatchStream
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS
from histopipe.slides.discovery import SlideFile, discover
from histopipe.slides.identity import fingerprint
from histopipe.slides.scale import MppSource
from histopipe.slides.tables import SlideLabel, SlideNames, read_labels, read_mpps
from histopipe.store.store import Store
from histopipe.system.progress import default_progress, message

DATA = "data.mdb"
_Slide = StoredSlide | OpenedSlide


def predict(
    run: str | Path, sources: str | Path | Sequence[str | Path], *, out: str | Path, **options: Any
) -> Predicted:
    """Predict every patch of stores or slides by a run's model, and put them together to slides and patients.

    Args:
        run: the folder of a finished run on patches.
        sources: stores, or slides and folders of these.
        out: the folder for the predictions. Slides that are in it already are kept.
        options: fields of `PredictOptions`.

    Raises:
        UsageError: the run cannot predict these, or `out` holds predictions of another.
        NothingToDo: no store, no slide, or no patch.
        MachineShort: disk or memory ran out, or TensorFlow is not installed.
        Interrupted: told to stop; slides that are done stay.

    Example:
        >>> predict("runs/first", "new-slides", out="predictions").done  # doctest: +SKIP
    """
    settings = PredictOptions(**options)
    check_whole(1, batch_size=settings.batch_size)
    if settings.aggregate not in get_args(Aggregation):
        raise UsageError(
            "--aggregate", found=repr(settings.aggregate), expected=" or ".join(AGGREGATIONS)
        )
    paths = store_paths(sources)
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise NothingToDo(f"{missing[0]} does not exist", todo="check the path")
    of_stores = [(path / DATA).exists() for path in store_paths(paths)]
    if any(of_stores) and not all(of_stores):
        raise UsageError("SLIDES and STORES are mixed", expected="one kind", todo="predict each on its own")  # fmt: skip
    classifier = load_classifier(
        Path(run), devices=settings.devices, batch_size=settings.batch_size
    )
    with ExitStack() as stack:
        stack.enter_context(run_folder.held(Path(out)))
        work = _Prediction(classifier, PredictionFolder(Path(out)), settings)
        opened = work.from_stores if all(of_stores) else work.from_files
        return work.run(opened(paths, stack))


class _Prediction:
    """A prediction under way."""

    def __init__(
        self, classifier: Classifier, folder: PredictionFolder, options: PredictOptions
    ) -> None:
        self._classifier, self._folder, self._options = classifier, folder, options
        self._result = Predicted(folder.path)
        self._count = 0
        self._said: dict[str, StoredSlide] = {}
        self._file_labels: dict[str, SlideLabel] = {}
        self._mpps: dict[str, Mpp] = {}
        self._give_up: Callable[[], None] = lambda: None

    def from_stores(self, paths: Sequence[Path], stack: ExitStack) -> Iterator[_Slide]:
        """The slides of stores that are not done."""
        self._options.check_for_stores()
        stores = [stack.enter_context(Store(path)) for path in paths]
        labels = self._labels([r.id for store in stores for r in store.complete.values()])
        self._hold({})
        slides = list(stored_slides(
            stores, self._classifier, batch_size=self._options.batch_size,
            on_error=self._options.on_error, labels=labels,
        ))  # fmt: skip
        if not slides:
            raise NothingToDo("no patch to predict", todo="see `histopipe info`")
        self._said = {slide.facts.slide: slide for slide in slides}
        if len(self._said) < len(slides):
            raise UsageError(
                "slides of one id in several stores", todo="predict the stores one by one, each with its own --out"
            )  # fmt: skip
        self._count = len(slides)
        return (
            slide for slide in slides if not self._is_done(slide.facts.slide, slide.facts.source)
        )

    def from_files(self, paths: Sequence[Path], stack: ExitStack) -> Iterator[_Slide]:
        """The slides of files that are not done, as they are planned."""
        options, classifier = self._options, self._classifier
        spec = files_spec(classifier, options)
        found = discover(paths)
        names = SlideNames(slide.id for slide in found)
        if options.mpp_csv is not None:
            self._mpps = read_mpps(options.mpp_csv, names, allow_extra=options.allow_extra_rows)
        self._file_labels = self._labels([slide.id for slide in found]) or {}
        self._hold({"spec": spec.to_json()})
        self._count = len(found)
        files = stack.enter_context(SlideFiles(
            spec, batch_size=options.batch_size, stain_norm=classifier.stain_norm,
            max_unreadable=options.max_unreadable, mpps=self._mpps, labels=self._file_labels,
            default_mpp=options.mpp, workers=options.workers,
            check=lambda record: check_scale(record, classifier),
        ))  # fmt: skip
        self._give_up = files.close
        todo = [slide for slide in found if not self._is_file_done(slide)]
        return files.planned(todo, self._fail)

    def run(self, slides: Iterator[_Slide]) -> Predicted:
        """Predict slides, then put all of the folder together."""
        result = self._result
        if result.kept:
            message(f"{len(result.kept)} slides are there already")
        began = time.monotonic()
        with (
            run_folder.roomy(self._folder.path),
            closing(default_progress().bar("predicting", unit="steps", detail=True)) as progress,
            PatchStream(self._classifier.network, progress) as stream,
        ):
            try:
                for slide, results in stream.run(slides):
                    self._slide(slide, results)
            except KeyboardInterrupt:
                self._give_up()  # first: what is being loaded waits for it
                raise Interrupted(
                    "interrupted", found=f"{len(result.done)} slides done",
                    todo="the same command goes on with the others",
                ) from None  # fmt: skip
            result.seconds, result.input_wait = time.monotonic() - began, stream.input_wait
            self._summarise()
        return result

    def _slide(
        self,
        slide: _Slide,
        results: Iterator[tuple[NDArray[np.float32], NDArray[np.integer]]],
    ) -> None:
        """A slide's predictions into the folder, unless it fails."""
        try:
            found = list(results)
            facts, thumbnail = slide.ended(), slide.thumbnail
        except (SlideError, DamagedStore) as error:
            self._fail(slide.facts.slide, str(error))
            return
        probability = np.concatenate([part for part, _ in found])
        corners = np.concatenate([part for _, part in found])
        order = np.lexsort((corners[:, 0], corners[:, 1]))
        probability, corners = probability[order], corners[order].astype(np.int64)
        zeros = np.zeros(len(order), np.int32)
        scores = PatchScores(
            self._classifier.classes, (facts.slide,), (facts.patient,), slide=zeros, patient=zeros,
            x_l0=corners[:, 0], y_l0=corners[:, 1], label=self._labels_of(slide, facts, corners),
            probability=probability,
        )  # fmt: skip
        self._folder.write(facts, scores, thumbnail)
        self._result.done.append(facts.slide)
        self._result.patches += facts.patches
        self._result.skipped += facts.skipped
        message(f"{self._place()} {facts.slide}: {facts.patches:,} patches")

    def _labels_of(
        self, slide: _Slide | None, facts: SlideFacts, corners: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """(N,) class numbers of patches, -1 where none is known."""
        classes = self._classifier.classes
        if self._classifier.labels_from == "annotation":
            # A slide's own label says nothing of any of its patches.
            drawn = slide.drawn(classes) if slide is not None else {}
            return np.array([drawn.get((x, y), -1) for x, y in corners.tolist()], np.int32)
        number = classes.index(facts.label) if facts.label in classes else -1
        return np.full(len(corners), number, np.int32)

    def _renewed(self, facts: SlideFacts) -> tuple[SlideFacts, PatchScores]:
        """A slide's predictions with what is said of it now: labels may have come, or changed, since they were made."""
        scores = self._folder.read(facts.slide)
        slide = self._said.get(facts.slide)
        said = self._file_labels.get(facts.slide)
        if slide is not None:
            now = replace(facts, label=slide.facts.label, patient=slide.facts.patient)
        elif said is not None:
            now = replace(facts, label=said.label, patient=said.patient or facts.patient)
        else:
            return facts, scores
        corners = np.stack([scores.x_l0, scores.y_l0], axis=1)
        label = self._labels_of(slide, now, corners)
        if now != facts or not np.array_equal(label, scores.label):
            scores = replace(scores, patients=(now.patient,), label=label)
            self._folder.write(now, scores)
        return now, scores

    def _summarise(self) -> None:
        found = [
            self._renewed(facts)
            for name, facts in self._folder.slides().items()
            if name not in self._result.failed
        ]
        classifier, folder = self._classifier, self._folder.path
        seen = sorted({f.slide for f, _ in found} & trained_on(classifier.folder / run_folder.SPLITS))  # fmt: skip
        if seen:
            message(
                f"warning: {len(seen)} of these slides took part in the training ({', '.join(seen[:3])}"
                f"{', …' if seen[3:] else ''}): figures of them say nothing of other slides"
            )
        parts = [scores for _, scores in found if len(scores.label)]
        by_level: tuple[tuple[str, Level], ...] = ((SLIDES, "slide"), (PATIENTS, "patient"))
        for name, level in by_level:
            write_summary(
                folder / name, parts, [facts for facts, _ in found], level, self._options.aggregate,
                classes=classifier.classes, judging=classifier.judging, thresholds=classifier.thresholds,
            )  # fmt: skip
        self._result.metrics = judged(parts, classifier.judging, classifier.thresholds)
        (folder / METRICS).unlink(missing_ok=True)
        if self._result.metrics is not None:
            text = json.dumps({"test": self._result.metrics.to_json()}, indent=2) + "\n"
            run_folder.write_text(folder / METRICS, text)

    def _hold(self, more: Mapping[str, Any]) -> None:
        """Write down what makes these predictions, or hold it against what is there.

        Raises:
            UsageError: there is something else, or what another model predicted.
        """
        classifier, folder = self._classifier, self._folder.path
        if not is_prediction(folder) and any(folder.iterdir()):
            raise UsageError(
                f"{folder} holds something else than predictions", found=min(folder.iterdir()).name,
                todo="choose another --out",
            )  # fmt: skip
        hold_against(
            self._folder.path / ABOUT,
            {
                "histopipe": __version__, "run": str(classifier.folder), "sha256": classifier.sha256,
                "classes": list(classifier.classes), "stain_norm": classifier.stain_norm,
                "patch_size": classifier.patch_size, **more,
            },
            # What a folder is called says nothing: the weights themselves are compared.
            silent=("histopipe", "run"), what="predictions",
        )  # fmt: skip

    def _labels(self, names: Sequence[str]) -> dict[str, SlideLabel] | None:
        path = self._options.labels
        if path is None:
            return None
        return read_labels(path, SlideNames(names), allow_extra=self._options.allow_extra_rows)

    def _is_file_done(self, slide: SlideFile) -> bool:
        try:
            now = fingerprint(slide)
        except SlideError:
            return False  # told when it is planned
        source = source_of(now.size_bytes, now.mtime_ns)
        facts = self._folder.done(slide.id, source)
        given = self._mpps.get(slide.id) or self._options.mpp
        # What a header says comes before what a user says.
        rescaled = facts is not None and facts.mpp_source != MppSource.PROPERTIES and given not in (None, facts.mpp)  # fmt: skip
        return not rescaled and self._is_done(slide.id, source)

    def _is_done(self, slide: str, source: str) -> bool:
        done = self._folder.done(slide, source) is not None
        if done:
            self._result.kept.append(slide)
        return done

    def _fail(self, slide: str, reason: str) -> None:
        self._result.failed[slide] = reason
        message(f"{self._place()} {slide}: failed: {reason}")

    def _place(self) -> str:
        result = self._result
        return f"{len(result.done) + len(result.failed) + len(result.kept)}/{self._count}"
