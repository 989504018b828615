"""Agreement of raters: the labels on which they agree, their disagreements, and Cohen's kappa."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from histopipe.labels.journal import UNSURE, PatchPlace
from histopipe.system.arrays import FloatArray
from histopipe.tasks.intervals import FEWEST_PATIENTS, interval_of, patients_notes
from histopipe.tasks.statistics import bootstrap_draws

ByRater = Mapping[str, Mapping[PatchPlace, str]]


def disagreements(by_rater: ByRater) -> dict[PatchPlace, dict[str, str]]:
    """Return the labels by rater of each patch whose raters do not agree. Against a class, "unsure" is a disagreement."""
    several = [
        patch
        for patch, count in Counter(chain.from_iterable(by_rater.values())).items()
        if count > 1
    ]
    of_patches = {
        patch: {name: labels[patch] for name, labels in by_rater.items() if patch in labels}
        for patch in several
    }
    return {patch: names for patch, names in of_patches.items() if len({*names.values()}) > 1}


def agreed_labels(by_rater: ByRater) -> dict[PatchPlace, str]:
    """Return the class of each patch on which all its raters agree; also if only one rater has labelled it."""
    excluded = disagreements(by_rater)
    return {
        patch: name
        for labels in by_rater.values()
        for patch, name in labels.items()
        if patch not in excluded and name != UNSURE
    }


@dataclass(frozen=True, slots=True)
class Kappa:
    """Agreement of two raters on the patches to which both gave a class.

    Attributes:
        patches, patients: number of these patches, and of their patients.
        agreement: share of equal classes; None without a patch.
        kappa: Cohen's kappa; None if it is undefined, as with one class only.
        interval: its 95 % confidence interval, from resampling patients.
        notes: reasons why there is no interval, or why it is unreliable.
    """

    patches: int
    patients: int
    agreement: float | None
    kappa: float | None
    interval: tuple[float, float] | None
    notes: list[str]


def cohens_kappa(
    first: Mapping[PatchPlace, str],
    second: Mapping[PatchPlace, str],
    classes: Sequence[str],
    patient_of: Callable[[str], str],
    *,
    resamples: int = 1000,
    seed: int = 1,
) -> Kappa:
    """Compare two raters; `patient_of` returns the patient of a slide.

    Source:
        J. Cohen, A coefficient of agreement for nominal scales, Educational and Psychological Measurement 20 (1960).
    """
    numbers = {name: number for number, name in enumerate(classes)}
    both = [
        (patch[0], numbers[first[patch]], numbers[second[patch]])
        for patch in first.keys() & second.keys()
        if first[patch] in numbers and second[patch] in numbers
    ]
    patients = sorted({patient_of(slide) for slide, _, _ in both})
    rows = {patient: row for row, patient in enumerate(patients)}
    pairs = np.zeros((len(patients), len(classes), len(classes)))
    for slide, one, other in both:
        pairs[rows[patient_of(slide)], one, other] += 1
    (kappa,) = _kappas(pairs.sum(axis=0, keepdims=True)) if both else (np.nan,)
    interval = None
    if len(patients) >= FEWEST_PATIENTS:
        draws = bootstrap_draws(len(patients), resamples, seed)
        interval = interval_of(_kappas(np.tensordot(draws, pairs, axes=1)), len(patients))
    equal = float(np.trace(pairs.sum(axis=0))) if both else 0.0
    return Kappa(
        len(both),
        len(patients),
        equal / len(both) if both else None,
        float(kappa) if np.isfinite(kappa) else None,
        interval if np.isfinite(kappa) else None,
        patients_notes(len(patients)),
    )


def _kappas(pairs: FloatArray) -> FloatArray:
    """Return the kappa of each (C, C) table of (R, C, C) counts; NaN where it is undefined."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = pairs / pairs.sum(axis=(1, 2), keepdims=True)
        observed = np.trace(shares, axis1=1, axis2=2)
        expected = (shares.sum(axis=1) * shares.sum(axis=2)).sum(axis=1)
        return np.asarray((observed - expected) / (1 - expected))
