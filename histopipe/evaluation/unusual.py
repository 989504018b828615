"""Unusual patches and slides: those whose features are farther from the training than nearly all held-out patients.

Source:
    K. Lee, K. Lee, H. Lee and J. Shin, A simple unified framework for detecting out-of-distribution samples, NeurIPS (2018):
    the Mahalanobis distance to the nearest class, with one covariance. Its shrinkage is that of Y. Chen, A. Wiesel, Y. C. Eldar
    and A. O. Hero, Shrinkage algorithms for MMSE covariance estimation, IEEE Transactions on Signal Processing 58 (2010).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.system.arrays import FloatArray
from histopipe.system.files import atomic_write, reading
from histopipe.system.output import Progress, counted, some

RANGE = "training-range.npz"
"""Name of the file in a run."""
FALSE_ALARMS = 0.05
"""Share of held-out patches, and of held-out patients, that are beyond the range."""
MOST_SLIDES = 100
"""Most training slides that the range is made from; and as many of other patients for the limits."""
_PATCHES = 50
"""Patches of a slide that decide, at most: the mean of more patches varies less."""
_SIZES = (1, 2, 3, 5, 10, 20, _PATCHES)
"""Numbers of patches of a slide for which there are limits, if slides have as many."""
_DIMENSIONS = 128
"""Features are projected onto this many random directions if they are more: covariances of few patches need it."""
_ENOUGH = 19
"""Patients of whom the highest distance is exceeded by `FALSE_ALARMS`."""
_SMALLEST = 1e-12
_BLOCK = 4096
"""Patches whose features are converted at once."""


@dataclass(frozen=True, slots=True)
class PatchFeatures:
    """(N, D) features of patches, and the class, slide and patient of each, (N,) numbers or names."""

    features: NDArray[np.floating]
    group: NDArray[Any]
    slide: NDArray[Any]
    patient: NDArray[Any]

    def rows(self, rows: NDArray[Any]) -> PatchFeatures:
        """Return some of the patches."""
        return PatchFeatures(*(getattr(self, entry.name)[rows] for entry in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[PatchFeatures]) -> PatchFeatures:
        """Return the patches of all parts, at least one."""
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))


@dataclass(frozen=True, slots=True)
class TrainingRange:
    """Features of the training.

    Attributes:
        whitening: (D, K), divides random projections of features by their standard deviations within classes.
        means: (C, K), whitened means of the classes.
        limits: root mean squares of the differences from the nearest class: of patches, and of the means of slides.
        rate: share of false alarms among slides, which is higher than `FALSE_ALARMS` with few patients.
        sizes, size_limits: limits of the means of slides with so many patches; empty in runs of earlier versions.
    """

    whitening: NDArray[np.float32]
    means: NDArray[np.float32]
    limits: FloatArray
    rate: FloatArray
    sizes: FloatArray = field(default_factory=partial(np.empty, 0))
    size_limits: FloatArray = field(default_factory=partial(np.empty, 0))

    def whitened(self, features: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return the (N, K) whitened features of patches, from (N, D) of any type."""
        blocks = np.array_split(features, -(-len(features) // _BLOCK) or 1)
        return np.concatenate([block.astype(np.float32) @ self.whitening for block in blocks])

    def residuals(self, white: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return the (N, K) differences of whitened features from the nearest class."""
        nearest: NDArray[np.floating] = white - self.means[0]
        for mean in self.means[1:]:
            apart = white - mean
            is_closer = (apart**2).sum(axis=1) < (nearest**2).sum(axis=1)
            nearest[is_closer] = apart[is_closer]
        return nearest

    def of_slide(self, residuals: NDArray[np.floating], most: int = _PATCHES) -> float:
        """Return the distance of the mean of at most `most` patches of a slide, from their residuals in its order."""
        return float(np.sqrt((residuals[spread(len(residuals), most)].mean(axis=0) ** 2).mean()))

    def slide_limit(self, count: int) -> float:
        """Return the limit for a slide with `count` patches. Between sizes, its square is linear in 1 / `count`."""
        if not len(self.size_limits):
            return float(self.limits[1])
        squares = self.size_limits[::-1] ** 2
        return math.sqrt(np.interp(1 / count, 1 / self.sizes[::-1], squares))

    def write(self, folder: Path) -> None:
        """Write the file of a run."""
        with atomic_write(folder / RANGE) as part, part.open("wb") as file:
            np.savez(file, allow_pickle=False, **asdict(self))


def read_range(folder: Path) -> TrainingRange | None:
    """Read the file of a run; None if it has none, as runs of earlier versions.

    Raises:
        DamagedStore: it is damaged.
    """
    if not (folder / RANGE).exists():
        return None
    with (
        reading(folder / RANGE, todo="remove it: unusual slides are not marked then"),
        (folder / RANGE).open("rb") as file,
    ):
        return TrainingRange(**np.load(file, allow_pickle=False))


def training_range(
    training: PatchFeatures, held_out: PatchFeatures | None, seed: int
) -> TrainingRange | None:
    """Return the range of training patches, with limits from those of other patients; None with one patient in all.

    If other patients are too few, random training patients take their part, and not that of the training. A patient with
    several slides has the distance of a random one. The limit of slides is the quantile ceil((n + 1) 0.95) / n, so that a
    share of `rate` of new patients of the same population is beyond it, on average over such limits. For slides with few
    patches it is that of slides thinned to as many; only slides with enough patches are taken if 19 patients have one.
    """
    rng = np.random.default_rng(seed)
    patients = rng.permutation(np.unique(training.patient))
    # Each class keeps a patient, whose features have its mean.
    kept = [
        rng.permutation(training.patient[training.group == g])[0] for g in np.unique(training.group)
    ]
    patients = np.concatenate([patients[~np.isin(patients, kept)], np.unique(kept)])
    if held_out is not None:  # a split by patch has patients in several subsets
        held_out = held_out.rows(~np.isin(held_out.patient, training.patient))
    missing = _ENOUGH - (0 if held_out is None else len(np.unique(held_out.patient)))
    taken = np.isin(
        training.patient,
        patients[: max(0, min(missing, len(patients) // 2, len(patients) - len(set(kept))))],
    )
    limiting = PatchFeatures.joined(
        [training.rows(taken), *([] if held_out is None else [held_out])]
    )
    if not len(limiting.patient):
        return None
    fitted = _fitted(training.rows(~taken))
    residuals = fitted.residuals(fitted.whitened(limiting.features))
    names, first, number = np.unique(limiting.slide, return_index=True, return_inverse=True)
    order, counts = rng.permutation(len(names)), np.bincount(number)

    def limit(most: int) -> tuple[float, float, float]:
        large = order[counts[order] >= most]
        enough = len(np.unique(limiting.patient[first][large])) >= _ENOUGH
        usable = large if enough else order
        one = usable[np.unique(limiting.patient[first][usable], return_index=True)[1]]
        distances = [fitted.of_slide(residuals[number == i], most) for i in one.tolist()]
        rank = min(math.ceil(round((len(one) + 1) * (1 - FALSE_ALARMS), 9)), len(one))
        highest = max(np.sort(distances)[rank - 1], _SMALLEST)
        size = 1 / float(np.mean(1 / np.minimum(counts[one], most)))
        return size, float(highest), 1 - rank / (len(one) + 1)

    limits = np.array([limit(most) for most in _SIZES])
    # Beyond the sizes that enough patients have, all slides are usually smaller than the largest of those.
    highest = np.maximum.accumulate([0, *limits[:-1, 0]])
    sizes, of_sizes, rates = limits[limits[:, 0] > highest].T
    of_patches = max(np.quantile(_root_mean_square(residuals), 1 - FALSE_ALARMS), _SMALLEST)
    return replace(
        fitted,
        limits=np.array([of_patches, of_sizes[-1]]),
        rate=rates[-1],
        sizes=sizes,
        size_limits=of_sizes,
    )


def spread(count: int, most: int = _PATCHES) -> NDArray[np.intp]:
    """Return up to `most` rows of a slide with `count` patches, at equal distances."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(np.intp)


def _root_mean_square(residuals: NDArray[np.floating]) -> FloatArray:
    return np.asarray(np.sqrt((residuals**2).mean(axis=1)), np.float64)


def _fitted(patches: PatchFeatures) -> TrainingRange:
    """Return a range without limits."""
    size = patches.features.shape[1]
    directions: FloatArray = np.eye(size)
    if size > _DIMENSIONS:
        directions = np.random.default_rng(0).normal(0, size**-0.5, (size, _DIMENSIONS))
    features = patches.features.astype(np.float32) @ directions
    groups, code = np.unique(patches.group, return_inverse=True)
    means = np.stack([features[code == i].mean(axis=0) for i in range(len(groups))])
    features -= means[code]
    count, size = features.shape
    covariance = (features.T @ features).astype(np.float64) / count
    trace, square = float(np.trace(covariance)), float((covariance**2).sum())
    excess = (count + 1 - 2 / size) * (square - trace**2 / size)
    share = min(1.0, ((1 - 2 / size) * square + trace**2) / max(excess, _SMALLEST))
    covariance = (1 - share) * covariance + share * trace / size * np.eye(size)
    values, vectors = np.linalg.eigh(covariance)
    white = vectors / np.sqrt(np.maximum(values, _SMALLEST))
    return TrainingRange(
        (directions @ white).astype(np.float32),
        (means @ white).astype(np.float32),
        np.empty(0),
        np.empty(0),
    )


def beyond(
    ranges: Sequence[TrainingRange], white: Sequence[NDArray[np.floating]]
) -> tuple[FloatArray, float]:
    """Return how far a slide's patches, (N,), and the slide are from the trainings of several models, as shares of limits.

    `white` are the (N, K) whitened features of each model. Shares above 1 are unusual. The share of the slide is that of
    the first model: means over models vary less, so that nobody knows how many of them are above 1.
    """
    pairs = [(each, each.residuals(values)) for each, values in zip(ranges, white, strict=True)]
    patches = [_root_mean_square(apart) / each.limits[0] for each, apart in pairs]
    first, apart = pairs[0]
    return np.mean(patches, axis=0), first.of_slide(apart) / first.slide_limit(len(apart))


def all_or_none(ranges: Sequence[TrainingRange | None]) -> list[TrainingRange]:
    """Return the ranges of several models; none if one has none."""
    existing = [each for each in ranges if each is not None]
    return existing if len(existing) == len(ranges) else []


def rate_settings(ranges: Sequence[TrainingRange]) -> dict[str, float]:
    """Return the rate of false alarms of slides, as a setting of a folder of predictions; empty without ranges."""
    if not ranges:
        return {}
    small = {} if len(ranges[0].size_limits) else {"limits_from_patches": _PATCHES}
    return {"false_alarms": float(ranges[0].rate), **small}


def unusual_text(shares: Mapping[str, float], settings: Mapping[str, Any]) -> str:
    """Return which slides are unusual, as text; empty if none is. `settings` are those of the predictions."""
    names = sorted((name for name, share in shares.items() if share > 1), key=lambda n: -shares[n])
    if not names:
        return ""
    return (
        f"{len(names)} of {counted(len(shares), 'slide')} differ more from the training than about "
        f"{1 - settings.get('false_alarms', FALSE_ALARMS):.0%} of slides like those of the training: {some(names)}; their predictions may be wrong"
        + (
            f" (this run has no limits for slides of fewer than {settings['limits_from_patches']} patches, which exceed its limit more often)"
            if "limits_from_patches" in settings
            else ""
        )
    )


def unusual_cells(shares: Mapping[str, float]) -> dict[str, dict[str, str]]:
    """Return the column `unusual` of a table, by name of the slide; no column without slides."""
    cells = {name: f"{share:.4g}" for name, share in shares.items()}
    return {"unusual": cells} if cells else {}


def warn_of_unusual(
    shares: Mapping[str, float], ranges: Sequence[TrainingRange], progress: Progress
) -> None:
    """Show which slides are unusual, if any."""
    text = unusual_text(shares, rate_settings(ranges))
    if text:
        progress.message(f"warning: {text}")
