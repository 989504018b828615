"""Segmentation: the loss of a patch depends on its annotated pixels only, and a training finds planted areas."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
import shapely.geometry
import tifffile

import histopipe
from helpers.commands import RunCommand, succeed
from helpers.lazy import keras, tf, training
from helpers.masked import DARK, EXTENT, LIGHT, SIDE, geojson, planted, planted_slide, planted_store
from helpers.stores import RECORD
from helpers.trainings import (
    TINY,
    assert_close,
    assert_equal,
    csv_rows,
    in_fork,
    in_tensorflow,
    opened_setup,
)
from histopipe.annotations.rules import NOT_ANNOTATED
from histopipe.errors import UsageError
from histopipe.predicting.predict_pixels import PixelPrediction
from histopipe.predictions.sources import PredictedSlide, PredictionsFolder
from histopipe.runs.run import Run
from histopipe.splits.splits import load_splits
from histopipe.store.store import Store
from histopipe.tasks.segmentation import Segmentation, divide_counts

NETWORK: dict[str, Any] = {"model": "small-cnn", "weights": "none"}
FLAGS = (
    *("--task", "segmentation", "--annotated-area", "8", "--model", "small-cnn"),
    *("--split-by", "slide", "--deterministic", "--batch-size", "15", "--learning-rate", "0.005"),
    *("--dropout", "0.05"),
)
EPOCHS = 40


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return planted_store(tmp_path_factory.mktemp("planted"), 10)


@pytest.fixture(scope="module")
def trained(stored: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    store, masks = stored
    succeed("train", store, "--masks", masks, *FLAGS, "--epochs", EPOCHS, "--out", out)
    return out


def test_planted_areas_are_found(trained: Path) -> None:
    run = Run(trained)
    assert run.task == Segmentation(classes=("background", "gland"))
    for subset in ("validation", "test"):
        metrics = run.result.metrics[subset].patient["mean"]
        dices = [metrics.values[name] for name in ("dice", "dice:gland", "dice:background")]
        assert all(value is not None and value >= 0.98 for value in dices)
        assert metrics.boundary_um < 1.5  # 0.5 µm per pixel
        assert metrics.calibration_error < 0.02
    annotated = json.loads((trained / "annotations.json").read_text())["slides"]
    for slide, values in run.by_slide().items():
        pixels = annotated[slide]["pixels"]
        share = pixels["gland"] / sum(pixels.values())
        assert values["predicted_gland"] == pytest.approx(share, abs=0.02)
        assert values["predicted_background"] == pytest.approx(1 - float(values["predicted_gland"]))
    rows = csv_rows(trained / "predictions.csv")
    assert {*rows[0]} == {"split", "slide", "patient", "x_l0", "y_l0", *run.task.output_names}
    index = json.loads((trained / "annotations.json").read_text())
    counts = np.array([[float(row[name]) for name in run.task.output_names] for row in rows])
    confusion, bins, boundary = divide_counts(counts, 2)
    # Each annotated pixel of the evaluated slides is counted once.
    slides = {row["slide"] for row in rows}
    pixels = [sum(index["slides"][s]["pixels"][c] for s in slides) for c in index["classes"]]
    assert confusion.sum(axis=(0, 2)).tolist() == pixels
    assert bins[:, 0].sum() == sum(pixels) and (bins[:, 2] <= bins[:, 0]).all()
    assert {*boundary[:, 1].ravel()} == {0, 1}


def check_model(run: str) -> None:
    """The saved model has stock layers only, and returns probabilities for each pixel."""
    model = keras.models.load_model(Path(run) / "model.keras")
    image = np.random.default_rng(1).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
    outputs = np.asarray(model(image))
    assert outputs.shape == (2, SIDE, SIDE, 2)
    np.testing.assert_allclose(outputs.sum(axis=-1), 1, atol=1e-5)


def test_the_saved_model_needs_keras_only(trained: Path) -> None:
    in_fork(check_model, trained)


def check_maps(run: str, folder: str) -> None:
    """The map of a slide differs in at most 0.5 % of its pixels from one pass of the network over the slide."""
    canvas = np.load(Path(folder) / "canvas.npy")
    saved = keras.models.load_model(Path(run) / "model.keras")
    objective = training.segmenter.SegmentationObjective(2)
    whole = training.segmenter.build_segmenter(
        "small-cnn", patch_size=len(canvas), objective=objective, dropout=0
    ).serving
    whole.set_weights(saved.get_weights())
    expected = np.argmax(whole(canvas[None]), axis=-1)[0] + 1
    values = tifffile.imread(Path(folder) / "P" / "maps" / "new.ome.tif")
    assert values.shape == expected.shape and (values != expected).mean() <= 0.005
    coarse = tifffile.imread(Path(folder) / "coarse" / "maps" / "new.ome.tif")
    assert coarse.shape == (len(canvas) // 4,) * 2
    assert (coarse != expected[2::4, 2::4]).mean() < 0.02


@pytest.mark.long(reason="three commands")
def test_predicted_slides_have_maps_outlines_and_areas(
    run: RunCommand, trained: Path, tmp_path: Path
) -> None:
    slide = tmp_path / "slides" / "new.tif"
    slide.parent.mkdir()
    canvas = planted_slide(slide, 77, repeats=2)
    np.save(tmp_path / "canvas.npy", canvas)
    flags = ("predict", trained, slide.parent, "--tissue", "none", "--tolerance-um", "0.5")
    succeed(*flags, "--out", tmp_path / "P")
    succeed(*flags, "--map-mpp", 2, "--out", tmp_path / "coarse")
    in_fork(check_maps, trained, tmp_path)
    (row,) = csv_rows(tmp_path / "P" / "slides.csv")
    true = 4 * planted(77).area * 0.25**2 / 1e6
    assert float(row["area_mm2_gland"]) == pytest.approx(true, rel=0.05)
    assert float(row["share_gland"]) + float(row["share_background"]) == pytest.approx(1)
    total = float(row["area_mm2_gland"]) + float(row["area_mm2_background"])
    assert total == pytest.approx((2 * EXTENT * 0.25) ** 2 / 1e6, rel=0.01)
    features = json.loads((tmp_path / "P" / "maps" / "new.geojson").read_text())["features"]
    drawn = shapely.union_all(
        [
            shapely.geometry.shape(feature["geometry"])
            for feature in features
            if feature["properties"]["classification"]["name"] == "gland"
        ]
    )
    first = shapely.intersection(drawn, shapely.box(0, 0, EXTENT, EXTENT))
    both = shapely.intersection(first, planted(77)).area
    assert 2 * both / (first.area + planted(77).area) > 0.95
    of_map = PredictionsFolder(tmp_path / "P").class_cells("new")
    assert of_map is not None
    (x, y, number, side), classes = of_map[0].T, of_map[1]
    assert classes == ("background", "gland") and set(side) == {2.0}
    centres = shapely.points(x + 1, y + 1)
    first = shapely.intersects(shapely.box(0, 0, EXTENT, EXTENT), centres)
    inside = shapely.contains(planted(77), centres)
    assert (inside[first] == (number[first] == 1)).mean() > 0.99
    with pytest.raises(UsageError, match="maps of pixels"):
        histopipe.heatmap(tmp_path / "P", out=tmp_path / "heatmaps")
    done = run(*flags, "--out", tmp_path / "P")
    assert done.returncode == 0 and "1 already done" in done.stderr + done.stdout
    done = run(*flags, "--out", tmp_path / "P", "--map-mpp", 0.1)
    assert done.returncode == 2 and "--map-mpp: found 0.1" in done.stderr


@pytest.mark.long(reason="it loads TensorFlow in a worker")
def test_a_run_finds_tissue(run: RunCommand, trained: Path, tmp_path: Path) -> None:
    """Dark areas, such as those that it was trained on, are tissue."""
    pixels = np.full((900, 1200, 3), LIGHT, np.uint8)
    pixels[200:700, 400:900] = DARK
    (tmp_path / "slides").mkdir()
    per_centimetre = (1e4 / 0.25, 1e4 / 0.25)
    tifffile.imwrite(
        tmp_path / "slides" / "new.tif", pixels, tile=(256, 256), photometric="rgb",
        resolution=per_centimetre, resolutionunit="CENTIMETER",
    )  # fmt: skip
    done = run(
        "ingest", tmp_path / "slides", "--out", tmp_path / "t.lmdb", "--mpp", 0.5, "--patch-size", 32,
        "--tissue", trained,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tissue at 0.5 µm per pixel takes about" in done.stderr + done.stdout
    with Store(tmp_path / "t.lmdb") as store:
        (record,) = store.slides
        assert record.planned == pytest.approx(500 * 500 / 64**2, rel=0.15)
        assert "model.keras" in str(store.spec["tissue_model"])


def test_runs_that_find_no_tissue_are_refused(tmp_path: Path) -> None:
    from histopipe.tiling.network import read_segmenter

    for name in ("config.toml", "model.keras"):
        (tmp_path / name).touch()
    for content in (
        {"classes": ["a", "b"], "patch_mpp": 1.0},
        {"task": "segmentation", "classes": ["a", "b", "c"], "patch_mpp": 1.0},
        {"task": "segmentation", "classes": ["a", "b"], "patch_mpp": None},
    ):
        (tmp_path / "metrics.json").write_text(json.dumps(content))
        with pytest.raises(UsageError, match="expected a segmentation with two classes"):
            read_segmenter(tmp_path / "model.keras")
    described = {"task": "segmentation", "classes": ["Fat", "background"], "patch_mpp": 2.0}
    described["spec"] = {"patch_size": 64}
    (tmp_path / "metrics.json").write_text(json.dumps(described))
    assert read_segmenter(tmp_path / "model.keras").class_index == 0
    (tmp_path / "config.toml").write_text('stain_norm = "macenko"\n')
    with pytest.raises(UsageError, match="found a run with --stain-norm macenko"):
        read_segmenter(tmp_path / "model.keras")


def test_shares_of_slides_with_and_without_a_scale_are_unknown() -> None:
    """Their areas are in mm² and in pixels, which have no sum."""
    scaled = PredictedSlide.of(dataclasses.replace(RECORD, id="a", patient="P", mpp=0.5), source="")
    scaled.areas.extend([1.0, 3.0])
    unscaled = dataclasses.replace(scaled, slide="b", mpp=None, areas=[300.0, 100.0])
    rows = {
        name: PixelPrediction._row("P", slides, "patient", {})[2:-1]
        for name, slides in (("one", [scaled]), ("none", [unscaled]), ("both", [scaled, unscaled]))
    }
    assert rows == {
        "one": ["1", "3", "0.25", "0.75"],
        "none": ["", "", "0.75", "0.25"],
        "both": ["", "", "", ""],
    }


@pytest.mark.long(reason="a command that loads TensorFlow")
def test_the_patches_of_stores_may_have_any_order(trained: Path, tmp_path: Path) -> None:
    """A map is computed in rows, and the last patch of this store is stored first."""
    store, _ = planted_store(tmp_path, 2, step=-1)
    succeed("predict", trained, store, "--out", tmp_path / "P")
    rows = csv_rows(tmp_path / "P" / "slides.csv")
    assert len(rows) == 2
    for seed, row in enumerate(rows):
        true = planted(seed).area * 0.25**2 / 1e6
        assert float(row["area_mm2_gland"]) == pytest.approx(true, rel=0.05)


@pytest.mark.long(reason="two trainings, of which one continues")
def test_a_training_on_two_devices_and_a_resumed_one_are_the_same(
    stored: tuple[Path, Path], trained: Path, tmp_path: Path
) -> None:
    """Patches of a batch have different ignored areas, and the two halves of a batch."""
    store, masks = stored
    two, resumed = tmp_path / "two", tmp_path / "resumed"
    flags = ("train", store, "--masks", masks, *FLAGS, "--epochs", 2)
    succeed(*flags, "--devices", "cpu:2", "--out", two)
    succeed(*flags, "--out", resumed)
    assert_close(two, resumed)
    succeed("train", "--resume", "--out", resumed, "--epochs", EPOCHS)
    assert_equal(resumed, trained)
    assert load_splits(resumed / "splits.json").task_name == "segmentation"


@in_tensorflow
@pytest.mark.long(reason="a step is traced for each size of a piece")
def test_a_step_in_three_pieces_is_the_whole_step(stored: tuple[Path, Path]) -> None:
    store, masks = stored
    with opened_setup(
        stores=store, masks=masks, task="segmentation", annotated_area="8", batch_size=15,
        split_by="slide", dropout=0.2, **NETWORK,
    ) as setup:  # fmt: skip
        step = setup.train_step(tf.distribute.OneDeviceStrategy("/CPU:0"), 1)
        batch = {
            name: tf.constant(value) for name, value in setup.batches("train", 1).load(0).items()
        }
        areas = (batch["mask"].numpy() != NOT_ANNOTATED).sum(axis=(1, 2))
        assert areas.min() < areas.max() / 2
        whole, ((values,),) = step.gradients(batch, tf.constant(5, tf.int64), 15, 15)
        pieces, parts = step.gradients(batch, tf.constant(5, tf.int64), 15, 5)
    assert len(parts) == 3
    np.testing.assert_allclose(np.concatenate([p[0] for p in parts]), values, rtol=1e-4, atol=1e-5)
    assert float(whole[2]) == float(pieces[2])
    for a, b in zip(whole[0], pieces[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * np.abs(a).max())


def loss_of(mask: np.ndarray, logits: np.ndarray) -> float:
    """Return the loss of one patch, pixel by pixel."""
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    pixels = [
        (int(c), p) for c, p in zip(mask.ravel(), shares.reshape(-1, 3), strict=True) if c != 255
    ]
    entropy = -np.mean([np.log(p[c]) for c, p in pixels])
    dice = []
    for number in {c for c, _ in pixels}:
        both = sum(p[number] for c, p in pixels if c == number)
        total = sum((c == number) + p[number] for c, p in pixels)
        dice.append(2 * both / total)
    return float(entropy + 1 - np.mean(dice))


@in_tensorflow
def test_the_loss_is_that_of_the_annotated_pixels_of_a_patch() -> None:
    rng = np.random.default_rng(1)
    masks = rng.integers(0, 3, (4, 8, 8)).astype(np.uint8)
    masks[0, :, :5], masks[1], masks[2, masks[2] == 1] = NOT_ANNOTATED, 2, NOT_ANNOTATED
    logits = rng.normal(0, 2, (4, 8, 8, 3)).astype(np.float32)
    objective = training.segmenter.SegmentationObjective(3)
    losses = objective.losses({"mask": tf.constant(masks)}, tf.constant(logits)).numpy()
    expected = [loss_of(*pair) for pair in zip(masks, logits, strict=True)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    changed = np.where((masks == NOT_ANNOTATED)[..., None], 50, logits)
    changed[3] = 0
    again = objective.losses({"mask": tf.constant(masks)}, tf.constant(changed)).numpy()
    np.testing.assert_array_equal(again[:3], losses[:3])


@in_tensorflow
def test_a_patch_without_annotated_pixels_has_no_weight(stored: tuple[Path, Path]) -> None:
    store, masks = stored
    with opened_setup(stores=store, masks=masks, task="segmentation", annotated_area="8",
                      batch_size=4, split_by="slide", **NETWORK) as setup:  # fmt: skip
        step = setup.train_step(tf.distribute.OneDeviceStrategy("/CPU:0"), 1)
        batch = setup.batches("train", 1).load(0)
    batch["mask"] = batch["mask"].copy()
    batch["mask"][1] = NOT_ANNOTATED
    tensors = {name: tf.constant(value) for name, value in batch.items()}
    gradients, ((values,),) = step.gradients(tensors, tf.constant(5, tf.int64), 4, 4)
    assert values[:, -1].numpy().tolist() == [1, 0, 1, 1] and float(gradients[2]) == 3
    assert np.isfinite(values).all()
    ((predicted,),) = step.predictions(tensors, 4, 4)
    assert predicted[:, -1].numpy().tolist() == [1, 0, 1, 1]


@in_tensorflow
def test_counts_are_those_of_each_pixel() -> None:
    rng = np.random.default_rng(2)
    mask = rng.integers(0, 3, (1, 16, 16)).astype(np.uint8)
    mask[:, :4] = NOT_ANNOTATED
    shares = rng.dirichlet(np.ones(3), (1, 16, 16)).astype(np.float32)
    objective = training.segmenter.SegmentationObjective(3)
    objective.patch_mpp = 2.0
    counts = objective.outcomes(
        {"mask": tf.constant(mask)}, tf.constant(shares), final=True
    ).numpy()
    confusion, bins, boundary = divide_counts(counts, 3)
    best = shares.argmax(axis=-1)
    for true in range(3):
        for predicted in range(3):
            assert confusion[0, true, predicted] == ((mask == true) & (best == predicted)).sum()
    annotated, confidence = mask != NOT_ANNOTATED, shares.max(axis=-1)
    number = np.minimum((confidence * 10).astype(int), 9)
    for n in range(10):
        inside = annotated & (number == n)
        assert bins[0, 0, n] == inside.sum() and bins[0, 2, n] == (inside & (best == mask)).sum()
        assert bins[0, 1, n] == pytest.approx(confidence[inside].sum(), rel=1e-5)
    assert boundary[0, 1].tolist() == [1, 1, 1]
    training_counts = objective.outcomes({"mask": tf.constant(mask)}, tf.constant(shares)).numpy()
    assert (
        np.array_equal(training_counts[:, :9], counts[:, :9]) and not training_counts[:, 9:].any()
    )


@in_tensorflow
def test_the_boundary_distance_is_the_95th_percentile() -> None:
    distance = training.segmenter.boundary_distance
    whole = np.ones((40, 40), bool)
    square = np.zeros((40, 40), bool)
    square[10:30, 10:30] = True
    assert distance(square, square, whole) == 0
    assert distance(square, np.roll(square, 3, axis=1), whole) == pytest.approx(3)
    spike = square.copy()
    spike[20, 30:34] = True  # 4 of 84 pixels of the boundary are farther away
    assert distance(square, spike, whole) == pytest.approx(0, abs=1)
    assert distance(square, ~whole, whole) is None and distance(whole, square, whole) is None
    # What is not annotated has no boundary: only the pixels next to it that are.
    half = whole.copy()
    half[:, 20:] = False
    assert distance(square, np.roll(square, 3, axis=1), half) == pytest.approx(3)


@in_tensorflow
def test_the_tokens_of_a_frozen_transformer_are_decoded(stored: tuple[Path, Path]) -> None:
    store, masks = stored
    settings: dict[str, Any] = {**TINY, "trainable": "head", "allow_mismatch": True}
    with opened_setup(stores=store, masks=masks, task="segmentation", annotated_area="all",
                      batch_size=4, split_by="slide", **settings) as setup:  # fmt: skip
        step = setup.train_step(tf.distribute.OneDeviceStrategy("/CPU:0"), 1)
        model = step.model
        trained = {weight.path.split("/")[0] for weight in model.training.trainable_variables}
        assert all(name.startswith(("decoder", "logits")) for name in trained)
        batch = {n: tf.constant(v) for n, v in setup.batches("train", 1).load(0).items()}
        gradients, _ = step.gradients(batch, tf.constant(0, tf.int64), 4, 4)
        step.apply(gradients, tf.zeros(2))
        outputs = model.serving(batch["image"])
    assert outputs.shape == (4, SIDE, SIDE, 2)


@in_tensorflow
@pytest.mark.parametrize("model", ["efficientnet-lite0", "resnet50"])
def test_maps_are_those_of_each_size(model: str) -> None:
    backbone = training.backbones.build_backbone(
        model, patch_size=64, weights="none", training=True
    )
    image = keras.Input((64, 64, 3), dtype="uint8")
    maps = training.segmenter.feature_maps(model, backbone, image, frozen=False)
    assert [each.shape[1] for each in maps] == [2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--task", "segmentation"], "--task segmentation: found no --masks"),
        (["--masks", "outlines"], "--masks: found --task classification"),
        (["--task", "segmentation", "--masks", "outlines", "--time-budget", "5m"], "--time-budget"),
        (["--annotated-area", "all"], "--annotated-area: found no --masks"),
        (["--task", "segmentation", "--masks", "none"], "none does not exist"),
        (["--task", "segmentation", "--masks", "outlines"], "fewer than two classes"),
        (["--task", "segmentation", "--masks", "outlines", "--calibrate"], "--calibrate: found"),
        (
            ["--task", "segmentation", "--masks", "outlines", "--label-smoothing", "0.1"],
            "--label-s",
        ),
        (
            ["--task", "segmentation", "--masks", "other", "--annotated-area", "all"],
            "another slide",
        ),
        (
            ["--task", "segmentation", "--masks", "outlines", "--annotated-area", "far"],
            "a distance",
        ),
    ],
)
def test_wrong_masks_give_one_message_and_create_no_folder(
    run: RunCommand, stored: tuple[Path, Path], tmp_path: Path, arguments: list[str], expected: str
) -> None:
    (tmp_path / "outlines").symlink_to(stored[1])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "s1.geojson").write_text(
        geojson(("gland", shapely.box(900, 900, 999, 999)))
    )
    arguments = [*arguments, "--model", "small-cnn", "--split-by", "slide", "--out", "out"]
    done = run("train", stored[0], *arguments)
    assert done.returncode in (2, 4) and expected in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_other_outlines_are_refused_when_a_run_is_resumed(
    run: RunCommand, stored: tuple[Path, Path], trained: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in stored[1].iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "s3.geojson").write_text(geojson(("gland", shapely.box(0, 0, 9, 9))))
    done = run("train", "--resume", "--out", trained, "--masks", other)
    assert done.returncode == 2 and "slide s3 has other annotations" in done.stderr
    assert str(trained / "annotations") in done.stderr


@in_tensorflow
def test_slides_without_an_outline_are_left_out_and_named(
    stored: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    for path in stored[1].iterdir():
        if path.stem not in ("s4", "s5"):
            (masks / path.name).write_bytes(path.read_bytes())
    (masks / "s5.geojson").write_text(geojson())
    with opened_setup(stores=stored[0], masks=masks, task="segmentation", annotated_area="8",
                      batch_size=4, split_by="slide", **NETWORK) as setup:  # fmt: skip
        excluded = {entry.slide for entry in setup.slides if entry.reason is not None}
    printed = capsys.readouterr().err
    assert "1 slides without annotations left out: s4" in printed
    assert "1 slides without an annotated pixel left out: s5" in printed
    assert excluded == {"s4", "s5"}
