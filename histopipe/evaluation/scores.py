"""Predictions as columns: of patches, and aggregated to slides and patients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Level = Literal["patch", "slide", "patient"]
Aggregation = Literal["mean", "top_k", "majority"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


@dataclass(frozen=True, slots=True)
class PatchScores:
    """Predictions of patches; or of slides or patients, if the model takes bags.

    Attributes:
        classes: class names, by number.
        slides, patients: slide ids and patients, by number.
        slide, patient: (N,) int32, slide and patient of each row.
        x_l0, y_l0: (N,) int64, top left corner, level-0 pixels; 0 if a row is no patch.
        label: (N,) int32 class numbers, -1 for none.
        probability: (N, C) float32.
        level: what a row is; in a patient's row, the slide is the patient, too.
    """

    classes: tuple[str, ...]
    slides: tuple[str, ...]
    patients: tuple[str, ...]
    slide: NDArray[np.int32]
    patient: NDArray[np.int32]
    x_l0: NDArray[np.int64]
    y_l0: NDArray[np.int64]
    label: NDArray[np.int32]
    probability: NDArray[np.float32]
    level: Level = "patch"


@dataclass(frozen=True, slots=True)
class Scores:
    """Predictions of patches, slides or patients, ready to be evaluated.

    Attributes:
        label: (N,) int32 class numbers.
        probability: (N, C) float64.
        patient: (N,) int32; the unit of resampling.
        item: (N,) int64, number of the patch, slide or patient.
        left_out: number of slides or patients without a label because their patches have several.
    """

    label: NDArray[np.int32]
    probability: NDArray[np.float64]
    patient: NDArray[np.int32]
    item: NDArray[np.int64]
    left_out: int = 0


def with_common_patients(parts: Sequence[PatchScores]) -> list[PatchScores]:
    """Return the same predictions, with one numbering of all patients."""
    names = tuple(sorted({name for part in parts for name in part.patients}))
    number = {name: i for i, name in enumerate(names)}
    renumbered = []
    for part in parts:
        new = np.array([number[name] for name in part.patients], np.int32)
        renumbered.append(replace(part, patients=names, patient=new[part.patient]))
    return renumbered


def joined_scores(parts: Sequence[PatchScores]) -> PatchScores:
    """Concatenate predictions; at least one, all of the same classes and level."""
    slides = sorted({name for part in parts for name in part.slides})
    number = {name: i for i, name in enumerate(slides)}
    renumbered = [
        replace(part, slide=np.array([number[name] for name in part.slides], np.int32)[part.slide])
        for part in with_common_patients(parts)
    ]
    together: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in renumbered])
        for name in ("slide", "patient", "x_l0", "y_l0", "label", "probability")
    }
    return replace(renumbered[0], slides=tuple(slides), **together)


def scores_of(
    patches: PatchScores, level: Level, how: Aggregation, *, top_k: int, positive: int
) -> Scores:
    """Return the scores of patches, or aggregate them to slides or patients.

    "mean": mean probability. "top_k": for two classes, the mean of the `top_k` highest probabilities of the positive class; for
    more, the same for each class, scaled to a sum of 1. "majority": share of patches for which a class is the most probable.
    """
    if level == "patch":
        probability = patches.probability.astype(np.float64)
        items = np.arange(len(patches.label))
        return Scores(patches.label, probability, patches.patient, items)
    group = patches.slide if level == "slide" else patches.patient
    order = np.argsort(group, kind="stable")
    items, starts = np.unique(group[order], return_index=True)
    label = patches.label[order]
    lowest, highest = np.minimum.reduceat(label, starts), np.maximum.reduceat(label, starts)
    probability = patches.probability[order].astype(np.float64)
    match how:
        case "mean":
            aggregated = _group_means(probability, starts)
        case "majority":
            likeliest = probability.argmax(axis=1)[:, None] == np.arange(probability.shape[1])
            aggregated = _group_means(likeliest.astype(np.float64), starts)
        case "top_k":
            aggregated = _highest(probability, starts, top_k, positive)
    one = lowest == highest
    patient = patches.patient[order][starts]
    return Scores(
        lowest[one], aggregated[one], patient[one], items[one].astype(np.int64), int((~one).sum())
    )


def _group_means(values: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return (G, C) means of the groups of (N, C) rows that begin at `starts`."""
    sizes = np.diff(starts, append=len(values))
    return np.asarray(np.add.reduceat(values, starts, axis=0) / sizes[:, None], np.float64)


def _highest(
    probability: NDArray[np.float64], starts: NDArray[np.intp], top_k: int, positive: int
) -> NDArray[np.float64]:
    """Return (G, C) means of the highest values of each group and class."""
    ends = np.append(starts[1:], len(probability))
    groups = (probability[start:end] for start, end in zip(starts, ends, strict=True))
    top = np.array([np.sort(group, axis=0)[-top_k:].mean(axis=0) for group in groups])
    if probability.shape[1] == 2:
        top[:, 1 - positive] = 1 - top[:, positive]
        return top
    return np.asarray(top / top.sum(axis=1, keepdims=True), np.float64)
