"""Metrics of segmentation: sums over the pixels of a patient, then means over patients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from histopipe.evaluation.evaluate import evaluate, evaluation_lines
from histopipe.predictions.prediction_tables import read_predictions, write_predictions
from histopipe.tasks.predictions import (
    EvaluationSettings,
    Predictions,
    joined_predictions,
    paired_differences,
    scores_of,
)
from histopipe.tasks.segmentation import Segmentation, divide_counts

SETTINGS = EvaluationSettings(resamples=200)


def counts_of(rng: np.random.Generator, classes: int, *, absent: float = 0.3) -> np.ndarray:
    """Return the counts of a patch, in which some classes are in neither truth nor prediction."""
    confusion = rng.integers(0, 50, (classes, classes)) * (rng.random((classes, classes)) > 0.2)
    gone = rng.random(classes) < absent
    confusion[gone] = confusion[:, gone] = 0
    pixels = rng.multinomial(confusion.sum(), np.full(10, 0.1))
    confidence = pixels * (np.arange(10) + 0.5) / 10
    right = rng.binomial(pixels, 0.5)
    has_boundary = rng.random(classes) < 0.6
    distance = rng.uniform(1, 9, classes) * has_boundary
    return np.concatenate([confusion.ravel(), pixels, confidence, right, distance, has_boundary])


def predictions_of(seed: int, classes: tuple[str, ...], slides: int = 9) -> Predictions:
    """Return 4 patches of each slide, and two slides of each of the first patients."""
    rng = np.random.default_rng(seed)
    slide = np.repeat(np.arange(slides, dtype=np.int32), 4)
    patient = np.maximum(slide - 2, slide // 2).astype(np.int32)
    output = np.stack([counts_of(rng, len(classes)) for _ in slide]).astype(np.float32)
    return Predictions(
        Segmentation(classes=classes),
        tuple(f"s{n}" for n in range(slides)),
        tuple(f"p{n}" for n in range(slides)),
        slide=slide,
        patient=patient,
        x_l0=np.arange(len(slide)),
        y_l0=np.zeros(len(slide), np.int64),
        target=np.ones((len(slide), 1)),
        output=output,
    )


def reference(predictions: Predictions, unit: str) -> dict[str, float]:
    """Return the metrics, one patient after the other."""
    classes = predictions.task.classes
    confusion, bins, boundary = divide_counts(predictions.output.astype(np.float64), len(classes))
    groups, values = predictions.owner("patient" if unit == "patient" else "slide")[0], {}
    for number, name in enumerate(classes):
        dices, ious, distances = [], [], []
        for group in np.unique(groups):
            summed = confusion[groups == group].sum(axis=0)
            both, right = summed[number].sum() + summed[:, number].sum(), summed[number, number]
            if both:
                dices.append(2 * right / both)
                ious.append(right / (both - right))
            distance, count = boundary[groups == group][:, :, number].sum(axis=0)
            if count:
                distances.append(distance / count)
        for metric, each in (("dice", dices), ("iou", ious), ("boundary_um", distances)):
            values[f"{metric}:{name}"] = float(np.mean(each)) if each else np.nan
    for metric in ("dice", "iou", "boundary_um"):
        used = [values[f"{metric}:{name}"] for name in classes if name != "background"]
        finite = [value for value in used if np.isfinite(value)]
        values[metric] = float(np.mean(finite)) if finite else np.nan
    pixels, confidence, right = bins.sum(axis=0)
    values["calibration_error"] = float(np.abs(confidence - right).sum() / pixels.sum())
    return values


@given(st.integers(0, 999), st.sampled_from([("background", "gland"), ("a", "b", "c")]))
def test_metrics_are_means_over_patients_of_sums_of_their_slides(
    seed: int, classes: tuple[str, ...]
) -> None:
    predictions = predictions_of(seed, classes)
    evaluation = evaluate([(predictions, {})], SETTINGS)
    assert evaluation.patch is None
    for unit, metrics in (
        ("slide", evaluation.slide["mean"]),
        ("patient", evaluation.patient["mean"]),
    ):
        for name, expected in reference(predictions, unit).items():
            value = metrics.values[name]
            assert (np.nan if value is None else value) == pytest.approx(expected, nan_ok=True)
        low, high = metrics.intervals["dice"]
        assert low <= metrics.dice <= high and metrics.patients == 7
        confusion = divide_counts(predictions.output, len(classes))[0].sum(axis=0)
        assert np.array_equal(metrics.confusion, confusion)
        assert sum(place.count for place in metrics.reliability) == confusion.sum()


def test_a_class_in_neither_is_left_out_and_counted_and_in_one_only_is_0() -> None:
    predictions = predictions_of(1, ("background", "gland"), slides=6)
    output = np.zeros_like(predictions.output)
    output[:, 0] = 100  # background as background
    output[predictions.slide == 0, 3] = 50  # gland as gland
    output[predictions.slide == 2, 1] = 50  # background as gland: in the prediction only
    output[:, 4] = output[:, :4].sum(axis=1)
    of_slides = evaluate(
        [
            (
                Predictions(
                    **{
                        **{n: getattr(predictions, n) for n in predictions.__slots__},
                        "output": output,
                    }
                ),
                {},
            )
        ],
        SETTINGS,
    ).slide["mean"]
    assert of_slides.values["dice:gland"] == 0.5  # 1 and 0; of the other four there is none
    assert "gland: in neither annotations nor predictions of 4 of 6 slides" in of_slides.notes[0]


def test_a_class_that_occurs_nowhere_has_no_part_in_the_mean() -> None:
    predictions = predictions_of(1, ("background", "gland", "rare"), slides=6)
    output = predictions.output.copy()
    output[:, [2, 5, 6, 7, 8]] = 0  # rare
    output[:, :2], output[:, 3:5] = 30, 60
    output[:, 9:39] = 0
    output[:, 9] = output[:, :9].sum(axis=1)
    values = evaluate([(replace(predictions, output=output), {})], SETTINGS).slide["mean"].values
    assert values["dice:rare"] is None
    assert values["dice"] == values["dice:gland"] == pytest.approx(120 / (120 + 60 + 30))


def test_tables_are_read_as_written(tmp_path: Path) -> None:
    predictions = predictions_of(3, ("background", "a, b: c", "tumour as stroma"))
    write_predictions(tmp_path / "p.csv", [({"split": "test"}, predictions)])
    read = read_predictions(tmp_path / "p.csv")["test"]
    assert read.task == predictions.task
    assert np.array_equal(read.output, predictions.output)
    first, second = (
        evaluate([(each, {})], SETTINGS).patient["mean"] for each in (predictions, read)
    )
    assert first.values == second.values


def test_runs_and_folds_are_compared() -> None:
    first, other = (predictions_of(seed, ("a", "b")) for seed in (1, 2))
    of_slides = [scores_of(each, "slide", "mean", SETTINGS) for each in (first, other)]
    same = paired_differences(of_slides[0], of_slides[0], SETTINGS)["patient_mean"]["dice"]
    assert same.value == 0
    differences = paired_differences(of_slides[0], of_slides[1], SETTINGS)["patient_mean"]
    a, b = (evaluate([(each, {})], SETTINGS).patient["mean"].dice for each in (first, other))
    assert differences["dice"].value == pytest.approx(b - a)
    assert differences["dice"].interval is not None
    joined = joined_predictions([first.rows(np.arange(16)), first.rows(np.arange(16, 36))])
    assert evaluate([(joined, {})], SETTINGS).slide["mean"].dice == pytest.approx(
        evaluate([(first, {})], SETTINGS).slide["mean"].dice
    )


def test_the_table_has_a_line_for_each_class() -> None:
    lines = evaluation_lines(
        "test", evaluate([(predictions_of(1, ("background", "gland")), {})], SETTINGS)
    )
    assert lines[0].split() == ["test", "n", "Dice", "IoU", "HD95", "µm", "ECE"]
    assert [line.split()[0] for line in lines[1:7]] == [
        "slide",
        "background",
        "gland",
        "patient",
        "background",
        "gland",
    ]
