"""Pictures of a run's report: the patches it was surest of, rightly and wrongly, and heatmaps of test slides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.evaluation.evaluate import positive_class
from histopipe.evaluation.scores import PatchScores
from histopipe.reports.background import Backgrounds
from histopipe.reports.heat_sources import HeatSource
from histopipe.reports.page import Block, Gallery, Picture, Text
from histopipe.reports.pictures import fitted, heat_picture
from histopipe.reports.run_facts import RunFacts
from histopipe.runs.task_config import PatchTrainConfig

_OF_EACH = 8
_PATCH_SIDE = 112
_MOST_HEATMAPS = 24


def telling_patches(run: RunFacts) -> Iterator[Block]:
    """Of each class, the patches that were most surely found, and most surely missed."""
    side = "test" if "test" in run.predictions else "validation"
    scores = run.predictions.get(side)  # type: ignore[call-overload]  # one of the two
    if scores is None or scores.level != "patch" or not run.stores:
        return
    yield Text(f"Of {side}. p is the probability of the class that the patch is of.", "soft")
    for number, name in enumerate(run.classes):
        of_class = np.flatnonzero(scores.label == number)
        own = scores.probability[of_class, number]
        found = scores.probability[of_class].argmax(axis=1) == number
        for title, rows in (
            (f"{name}, most surely found", of_class[found][np.argsort(-own[found], kind="stable")]),
            (
                f"{name}, most surely missed",
                of_class[~found][np.argsort(own[~found], kind="stable")],
            ),
        ):
            pictures = list(_patches(run, scores, rows, number))
            if pictures:
                yield Gallery(title, pictures)


def _patches(
    run: RunFacts, scores: PatchScores, rows: NDArray[np.intp], number: int
) -> Iterator[Picture]:
    """Pictures of the first of some rows that can be read."""
    shown = 0
    for row in rows.tolist():
        if shown == _OF_EACH:
            return
        slide = scores.slides[scores.slide[row]]
        pixels = _pixels(run, slide, int(scores.x_l0[row]), int(scores.y_l0[row]))
        if pixels is None:
            continue
        probability = float(scores.probability[row, number])
        shown += 1
        yield Picture.of(
            f"patch-{row}", f"{slide}, p = {probability:.3f}", fitted(pixels, _PATCH_SIDE)
        )


def _pixels(run: RunFacts, slide: str, x: int, y: int) -> NDArray[np.uint8] | None:
    place = run.store_of(slide)
    if place is None:
        return None
    store, number = place
    try:
        index = store.index(number)
        rows = np.flatnonzero((index["x_l0"] == x) & (index["y_l0"] == y))
        return store.read(store.records[number].id, int(rows[0])) if len(rows) else None
    except (DamagedStore, UsageError):
        return None


def heatmaps(run: RunFacts) -> Gallery | None:
    """Of the slides that were validated or tested on, some; None where there is none to draw."""
    made: list[Picture] = []
    name = None
    if isinstance(run.config, PatchTrainConfig):
        positive = positive_class(run.classes, run.judging.positive)
        name = run.classes[-1 if positive is None else positive]
    backgrounds = Backgrounds({}, run.stores)
    try:
        for slide, heat_of in HeatSource(run.folder, run.stores, name).slides():
            if len(made) == _MOST_HEATMAPS:
                break
            with suppress(NothingToDo, DamagedStore):
                heat = heat_of()
                if heat is not None:
                    picture = heat_picture(heat, backgrounds.of(slide))
                    made.append(Picture.of(f"heat-{len(made)}", f"{slide}: {heat.what}", picture))
    except UsageError:
        return None  # a bag model without attention
    title = "Dark is 0, yellow is 1; no colour: not validated or tested"
    return Gallery(title, made) if made else None
