"""The best model's predictions as columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from histopipe.dataset.sample_table import unpack_keys
from histopipe.dataset.samples import SampleSource
from histopipe.dataset.splits import Splits
from histopipe.evaluation.scores import Level, PatchScores
from histopipe.training.tally import Predictions


def patch_scores(
    predictions: Predictions,
    sources: Sequence[SampleSource],
    splits: Splits,
    *,
    level: Level = "patch",
) -> PatchScores:
    """Predictions with the slides, patients and places that they are of, in the order of their slides.

    Args:
        predictions: of patches or bags.
        sources: that they are in.
        splits: whose patients are meant.
        level: what each is of.
    """
    ordinals, slides, rows = unpack_keys(predictions.key)
    order = np.lexsort((rows, slides, ordinals))
    ordinals, slides, rows = ordinals[order], slides[order], rows[order]
    patient_of = {(slide.store, slide.slide): slide.patient for slide in splits.slides}
    begins = np.flatnonzero(np.diff(ordinals, prepend=-1) | np.diff(slides, prepend=-1))
    ends = [*begins[1:].tolist(), len(rows)]
    ids = Counter(slide.id for slide in splits.slides)
    slide_names: dict[str, int] = {}
    patient_names: dict[str, int] = {}
    slide, patient = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
    corners = np.zeros((len(rows), 2), np.int64)
    for begin, end in zip(begins.tolist(), ends, strict=True):
        here, place = slice(begin, end), (int(ordinals[begin]), int(slides[begin]))
        source = sources[place[0]]
        name = source.records[place[1]].id
        # Two stores may each have a slide "1".
        name = name if ids[name] == 1 else f"{name}@{source.uuid[:8]}"
        slide[here] = _number(slide_names, name)
        patient[here] = _number(patient_names, patient_of[place])
        if level == "patch":
            index = source.index(place[1])
            corners[here] = np.stack([index["x_l0"][rows[here]], index["y_l0"][rows[here]]], axis=1)
    return PatchScores(
        splits.classes, tuple(slide_names), tuple(patient_names), slide=slide, patient=patient,
        x_l0=corners[:, 0], y_l0=corners[:, 1], label=predictions.label[order],
        probability=predictions.probability[order], level=level,
    )  # fmt: skip


def _number(names: dict[str, int], name: str) -> int:
    return names.setdefault(name, len(names))
