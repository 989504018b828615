"""The range of a training's features: against an obvious version, its rate of false alarms, and shifts that it finds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from histopipe.errors import DamagedStore
from histopipe.evaluation.unusual import (
    RANGE,
    PatchFeatures,
    TrainingRange,
    beyond,
    rate_settings,
    read_range,
    training_range,
    unusual_cells,
    unusual_text,
)

PATCHES = 30


def cohort(
    rng: np.random.Generator,
    patients: int,
    mix: np.ndarray,
    shift: float = 0.0,
    name: str = "P",
    *,
    patches: int = PATCHES,
) -> PatchFeatures:
    """Return patches of patients with one or two slides, of two classes; features are mixed by a (D, D) matrix."""
    size, parts = len(mix), []
    offset = shift * rng.normal(size=size)
    for i in range(patients):
        of_patient = rng.normal(0, 0.5, size)
        for j in range(1 + i % 2):
            values = (rng.normal(size=(patches, size)) + of_patient) @ mix
            values += (i % 2) * np.linspace(-1, 1, size) + offset
            texts = (np.full(patches, f"{name}{i}{end}") for end in (f"-{j}", ""))
            parts.append(PatchFeatures(values, np.full(patches, i % 2), *texts))
    return PatchFeatures.joined(parts)


def a_mix(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return a matrix that makes features correlated, of different variances."""
    scales = np.exp(-4 * np.arange(size) / size)
    return np.asarray(rng.normal(size=(size, size)) * scales[:, None] * 3 / np.sqrt(size))


def of_slides(reference: TrainingRange, patches: PatchFeatures) -> np.ndarray:
    """Return shares of the limit of slides."""
    whitened = patches.features.astype(np.float32) @ reference.whitening
    slides = np.unique(patches.slide)
    return np.array([beyond([reference], [whitened[patches.slide == name]])[1] for name in slides])


def a_range(training: PatchFeatures, held_out: PatchFeatures | None) -> TrainingRange:
    reference = training_range(training, held_out, 1)
    assert reference is not None
    return reference


def test_distances_are_those_of_an_obvious_version() -> None:
    rng = np.random.default_rng(0)
    patches = cohort(rng, 40, a_mix(rng, 6))
    reference = a_range(patches, cohort(rng, 30, a_mix(rng, 6), name="V"))
    means = np.stack([patches.features[patches.group == i].mean(axis=0) for i in (0, 1)])
    centred = patches.features - means[patches.group]
    covariance = centred.T @ centred / len(centred)
    # The shrinkage is shares from the distances, and is small: 1,800 patches have 6 features.
    (count, size), trace, square = centred.shape, np.trace(covariance), (covariance**2).sum()
    share = ((1 - 2 / size) * square + trace**2) / (
        (count + 1 - 2 / size) * (square - trace**2 / size)
    )
    assert 0 < share < 0.05
    shrunk = (1 - share) * covariance + share * trace / size * np.eye(size)
    inverse = np.linalg.inv(shrunk)

    def distance(difference: np.ndarray) -> float:
        return float(np.sqrt(difference @ inverse @ difference / size))

    new = rng.normal(size=(120, size)).astype(np.float32)
    differences = [x - min(means, key=lambda mean: distance(x - mean)) for x in new]
    shares, slide = beyond([reference], [new @ reference.whitening])
    expected = [distance(difference) for difference in differences]
    np.testing.assert_allclose(shares * reference.limits[0], expected, rtol=1e-4)
    chosen = [round(i * 119 / 49) for i in range(50)]
    mean = np.mean([differences[i] for i in chosen], axis=0)
    assert slide * reference.limits[1] == pytest.approx(distance(mean), rel=1e-4)


MANY = pytest.mark.nightly(reason="more simulations; the smallest one is in make test")


@pytest.mark.parametrize(
    ("size", "patients", "limiting"),
    [
        (32, 20, 5),
        *(pytest.param(*sizes, marks=MANY) for sizes in ((32, 60, 25), (200, 60, 40), (32, 60, 0))),
    ],
)
def test_false_alarms_of_held_out_patients(size: int, patients: int, limiting: int) -> None:
    slides, patches, shares = [], [], []
    seeds = 25 if size < 100 else 9  # long
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        mix = a_mix(rng, size)
        held_out = cohort(rng, limiting, mix, name="V") if limiting else None
        reference = a_range(cohort(rng, patients, mix), held_out)
        new = cohort(rng, 40, mix)
        slides.append((of_slides(reference, new) > 1).mean())
        patches.append((beyond([reference], [new.features @ reference.whitening])[0] > 1).mean())
        far = cohort(rng, 10, mix, shift=0.5)
        shares.append((of_slides(reference, far) > 1).mean())
    count = limiting + max(0, min(19 - limiting, patients // 2)) + 1
    assert float(reference.rate) == pytest.approx(
        1 - min(math.ceil(round(0.95 * count, 9)), count - 1) / count
    )
    error = np.std(slides) / math.sqrt(seeds)
    assert abs(np.mean(slides) - float(reference.rate)) < 2.5 * error + 0.005, np.mean(slides)
    assert abs(np.mean(patches) - 0.05) < 0.02
    assert np.mean(shares) > 0.95


@pytest.mark.parametrize("patches", [1, 4, 9, 30])
def test_false_alarms_of_slides_with_few_patches(patches: int) -> None:
    """After a training on slides of many patches: means of few patches vary more."""
    alarms = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        mix = a_mix(rng, 16)
        held_out = cohort(rng, 30, mix, name="V", patches=60)
        reference = a_range(cohort(rng, 30, mix, patches=60), held_out)
        new = cohort(rng, 40, mix, name="N", patches=patches)
        alarms.append((of_slides(reference, new) > 1).mean())
    assert np.mean(alarms) < 0.11, np.mean(alarms)


def test_few_slides_with_enough_patches_have_the_limits_if_they_are_19_patients() -> None:
    rng = np.random.default_rng(8)
    mix, name = a_mix(rng, 8), "V"
    small = cohort(rng, 12, mix, name="S", patches=4)
    limits = []
    for count in (18, 19):
        large = cohort(rng, count, mix, name=name, patches=60)
        both = PatchFeatures.joined([large, small])
        alone, mixed = (
            a_range(cohort(np.random.default_rng(1), 30, mix), each) for each in (large, both)
        )
        limits.append((alone.size_limits, mixed.size_limits))
    assert (limits[1][0][4:] == limits[1][1][4:]).all()
    assert limits[0][0][4:].tolist() != limits[0][1][4:].tolist()


def test_many_small_slides_do_not_change_the_limit_of_large_ones() -> None:
    """Of 59 patients, 19 have slides of 30 patches and 40 of 4: none has the 50 of the last limit."""
    rng = np.random.default_rng(9)
    mix = a_mix(rng, 8)
    large, small = (
        cohort(rng, count, mix, name=name, patches=patches)
        for count, name, patches in ((19, "V", 30), (40, "S", 4))
    )
    large = large.rows(np.char.endswith(large.slide, "-0"))
    alone, mixed = (
        a_range(cohort(np.random.default_rng(1), 30, mix), each)
        for each in (large, PatchFeatures.joined([large, small]))
    )
    assert mixed.sizes.tolist() == pytest.approx([1, 2, 3, 5, 10, 20])
    assert mixed.slide_limit(20) == pytest.approx(alone.slide_limit(20))
    assert mixed.slide_limit(30) < mixed.slide_limit(4) / 1.2


def test_many_features_are_projected() -> None:
    rng = np.random.default_rng(3)

    def draw(patients: int, shift: float, name: str) -> PatchFeatures:
        names = np.repeat([f"{name}{i}" for i in range(patients)], 4)
        values = rng.normal(size=(len(names), 1500)) + shift
        return PatchFeatures(values.astype(np.float16), np.zeros(len(names)), names, names)

    reference = a_range(draw(60, 0, "P"), draw(40, 0, "V"))
    assert reference.whitening.shape == (1500, 128)
    assert (of_slides(reference, draw(100, 0, "N")) > 1).mean() < 0.15
    assert (of_slides(reference, draw(20, 1, "N")) > 1).all()


def test_patients_of_the_training_give_no_limits() -> None:
    """A split by patch has patients in several subsets: their patches are closer than those of new patients."""
    rng = np.random.default_rng(5)
    mix = a_mix(rng, 16)
    training = cohort(rng, 30, mix)
    leaked = a_range(training, training.rows(np.arange(0, len(training.patient), 3)))
    np.testing.assert_array_equal(leaked.limits, a_range(training, None).limits)
    new = cohort(rng, 20, mix, name="N")
    some = a_range(training, PatchFeatures.joined([training, new]))
    assert float(some.rate) == pytest.approx(1 - 19 / 20, abs=0.01)


def test_each_class_keeps_a_patient() -> None:
    rng = np.random.default_rng(6)
    mix = a_mix(rng, 4)
    patches = cohort(rng, 12, mix)
    _, number = np.unique(patches.patient, return_inverse=True)
    rare = replace(patches, group=number)
    # Each patient is a class: none can be taken for limits.
    assert training_range(rare, None, 1) is None
    assert len(a_range(rare, cohort(rng, 3, mix, name="V")).means) == 12


def test_rank_of_the_limit_and_the_file_of_a_range(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    mix = a_mix(rng, 4)
    assert training_range(cohort(rng, 1, mix), None, 1) is None
    # With ten patients, five of them have the limits: one of six new ones is a false alarm.
    reference = a_range(cohort(rng, 10, mix), None)
    assert float(reference.rate) == pytest.approx(1 / 6)
    # Of 40 other patients with a slide each, the limit is the distance of the one at rank ceil(41 · 0.95), which is 39.
    validation = cohort(rng, 40, mix, name="V")
    validation = validation.rows(np.char.endswith(validation.slide, "-0"))
    many = a_range(cohort(rng, 10, mix), validation)
    assert float(many.rate) == pytest.approx(2 / 41)
    shares = np.sort(of_slides(many, validation))
    assert shares[-2] == pytest.approx(1) and shares[-1] > 1.001
    reference.write(tmp_path)
    again = read_range(tmp_path)
    assert again is not None
    for name in ("whitening", "means", "limits", "rate", "sizes", "size_limits"):
        np.testing.assert_array_equal(getattr(again, name), getattr(reference, name))
    (tmp_path / RANGE).write_bytes((tmp_path / RANGE).read_bytes()[:100])
    with pytest.raises(DamagedStore, match=RANGE):
        read_range(tmp_path)
    (tmp_path / RANGE).unlink()
    assert read_range(tmp_path) is None


def test_constant_features_have_finite_distances() -> None:
    names = np.repeat([f"P{i}" for i in range(30)], 2)
    patches = PatchFeatures(np.ones((60, 3), np.float32), np.zeros(60), names, names)
    reference = a_range(patches, None)
    for value in (1, 5):
        shares, slide = beyond([reference], [np.full((2, 3), value) @ reference.whitening])
        assert np.isfinite(shares).all() and (shares <= 1).all() == (value == 1)
        assert (slide <= 1) == (value == 1)


def test_shares_of_several_models() -> None:
    of_one = TrainingRange(
        np.eye(2, dtype=np.float32),
        np.zeros((1, 2), np.float32),
        np.array([2.0, 1.0]),
        np.array(0.05),
    )
    of_two = TrainingRange(of_one.whitening, of_one.means, np.array([4.0, 2.0]), of_one.rate)
    patches, slide = beyond(
        [of_one, of_two], [np.array([[1, 1], [3, 3]]), np.array([[-2, 2], [8, 8]])]
    )
    assert patches == pytest.approx([0.5, 1.75])
    assert slide == pytest.approx(2 / 1)  # of the first model, whose rate is known
    shares = {"a": 0.5, "b": 1.2, "c": 3.0}
    assert unusual_text(shares, {}).startswith(
        "2 of 3 slides differ more from the training than about 95%"
    )
    assert "c, b" in unusual_text(shares, {"false_alarms": 0.2})
    text = unusual_text(shares, rate_settings([replace(of_one, rate=np.array(0.2)), of_two]))
    assert "about 80% of" in text and "no limits for slides of fewer than 50 patches" in text
    sizes = np.array([1.0, 2, 3, 5, 10, 20, 50])
    of_sizes = replace(of_one, sizes=sizes, size_limits=np.array([8.0, 6, 5, 4, 3, 2, 1]))
    assert "fewer than 50" not in unusual_text(shares, rate_settings([of_sizes]))
    assert [of_sizes.slide_limit(n) for n in (1, 2, 3, 5, 10, 20, 50, 700)] == pytest.approx(
        [8, 6, 5, 4, 3, 2, 1, 1]
    )
    # The square of the limit is linear in 1 / n, as a variance is.
    assert of_sizes.slide_limit(8) ** 2 == pytest.approx(
        9 + 7 * (1 / 8 - 1 / 10) / (1 / 5 - 1 / 10)
    )
    assert of_one.slide_limit(3) == 1
    assert not unusual_text({"a": 1.0}, {}) and not rate_settings([])
    assert unusual_cells(shares) == {"unusual": {"a": "0.5", "b": "1.2", "c": "3"}}
    assert unusual_cells({}) == {}
