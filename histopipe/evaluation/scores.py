"""Predictions as columns: of patches, and of what these are aggregated to."""

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
    """What a model says of patches; or, if it looks at bags of them, of whole slides or patients.

    Attributes:
        classes: names, by number.
        slides, patients: names, by number.
        slide, patient: (N,) int32, whose patch it is.
        x_l0, y_l0: (N,) int64, its corner in level-0 pixels; 0 for what is no patch.
        label: (N,) int32 class numbers, -1 for none.
        probability: (N, C) float32.
        level: what a row is of; a patient's row has the patient's name for its slide, too.
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
    """What a model says of patches, slides or patients.

    Attributes:
        label: (N,) int32 class numbers.
        probability: (N, C) float64.
        patient: (N,) int32, whose it is: what is resampled together.
        item: (N,) int64, which patch, slide or patient it is of.
        left_out: slides or patients whose patches have several labels, and so have none themselves.
    """

    label: NDArray[np.int32]
    probability: NDArray[np.float64]
    patient: NDArray[np.int32]
    item: NDArray[np.int64]
    left_out: int = 0


def with_common_patients(parts: Sequence[PatchScores]) -> list[PatchScores]:
    """The same predictions, with one numbering of all their patients."""
    names = tuple(sorted({name for part in parts for name in part.patients}))
    number = {name: i for i, name in enumerate(names)}
    renumbered = []
    for part in parts:
        new = np.array([number[name] for name in part.patients], np.int32)
        renumbered.append(replace(part, patients=names, patient=new[part.patient]))
    return renumbered


def joined_scores(parts: Sequence[PatchScores]) -> PatchScores:
    """Predictions of several slides, or sets of them, as one. At least one, of the same classes and level."""
    slides = sorted({name for part in parts for name in part.slides})
    number = {name: i for i, name in enumerate(slides)}
    renumbered = [
        (part, np.array([number[name] for name in part.slides], np.int32)[part.slide])
        for part in with_common_patients(parts)
    ]
    first = renumbered[0][0]
    together: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part, _ in renumbered])
        for name in ("patient", "x_l0", "y_l0", "label", "probability")
    }
    together |= {
        "slides": tuple(slides), "slide": np.concatenate([numbers for _, numbers in renumbered]),
    }  # fmt: skip
    return replace(first, **together)


def scores_of(
    patches: PatchScores, level: Level, how: Aggregation, *, top_k: int, positive: int
) -> Scores:
    """Scores of patches as they are, or of slides or patients from all of their patches together.

    "mean": of the probabilities. "top_k": of two classes, the mean of the `top_k` highest probabilities of the positive one; of
    more, that of each class, made to add up to 1. "majority": the share of patches that each class is the likeliest of.

    Args:
        patches: of one or more slides.
        level: what is scored.
        how: not for patches.
        top_k: patches, at most.
        positive: number of the positive class, where there are two.
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
    """(G, C) means of the runs of (N, C) rows that begin at `starts`."""
    sizes = np.diff(starts, append=len(values))
    return np.asarray(np.add.reduceat(values, starts, axis=0) / sizes[:, None], np.float64)


def _highest(
    probability: NDArray[np.float64], starts: NDArray[np.intp], top_k: int, positive: int
) -> NDArray[np.float64]:
    """(G, C) means of the highest values of each run and class."""
    ends = np.append(starts[1:], len(probability))
    top = np.array(
        [
            np.sort(probability[start:end], axis=0)[-top_k:].mean(axis=0)
            for start, end in zip(starts, ends, strict=True)
        ]
    )
    if probability.shape[1] == 2:
        top[:, 1 - positive] = 1 - top[:, positive]
        return top
    return np.asarray(top / top.sum(axis=1, keepdims=True), np.float64)
