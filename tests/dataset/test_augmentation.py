"""Augmentation and stain normalization: independent of the batch, and equal to a reference in numpy."""

from __future__ import annotations

import itertools
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from scipy.ndimage import map_coordinates
from scipy.spatial.transform import Rotation
from scipy.stats import kstest

import histopipe
from helpers.commands import RunCommand
from helpers.lazy import Lazy, tf
from helpers.stores import SPEC, a_store, jpegs
from histopipe.dataset.stain_fit import TooLittleTissue, fit_pixels, fit_slide
from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.store.record import StainFit
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.tasks.choices import AUGMENTATIONS, StainNorm

pytestmark = pytest.mark.usefixtures("tensorflow")


transforms: Any = Lazy("histopipe.dataset.transforms")
RNG = np.random.default_rng(1)
KEYS = RNG.integers(0, 2**62, 24)

Pixels = np.ndarray[Any, Any]


STAINS = np.array([[0.60, 0.72, 0.35], [0.25, 0.85, 0.46]])
STAINS /= np.linalg.norm(STAINS, axis=1, keepdims=True)


def he_image(
    side: int = 48, *, eosin: float = 0.8, haematoxylin: float = 0.6, seed: int = 1
) -> Pixels:
    """Return (H, W, 3) uint8 with random amounts of two stains, and background."""
    rng = np.random.default_rng(seed)
    amounts = rng.gamma(2.0, [haematoxylin / 2, eosin / 2], (side, side, 2))
    amounts[: side // 4] = 0
    light = 256 * np.exp(-(amounts @ STAINS)) - 1
    return np.asarray(np.clip(np.rint(light), 0, 255), np.uint8)


IMAGES = np.stack([he_image(seed=i) for i in range(24)])


@cache
def seeds_of() -> Any:
    """Return the seeds of 24 patches."""
    return transforms.sample_seeds(tf.constant(KEYS), transforms.epoch_seed(7, 3))


@pytest.mark.parametrize(
    "steps", [*((name,) for name in AUGMENTATIONS), AUGMENTATIONS], ids="+".join
)
def test_results_depend_on_epoch_seed_and_patch_but_not_on_the_batch(
    steps: tuple[str, ...],
) -> None:
    whole = transforms.augment(IMAGES, seeds_of(), steps).numpy()
    for part in ([5], [3, 5, 7], [*range(4, 21)], [*range(23, -1, -1)]):
        augmented = transforms.augment(IMAGES[part], tf.gather(seeds_of(), part), steps).numpy()
        np.testing.assert_array_equal(
            transforms.to_uint8(augmented), transforms.to_uint8(whole[part])
        )
    image = np.repeat(IMAGES[:1], 24, axis=0)
    first = transforms.augment(image, seeds_of(), steps).numpy()
    assert len({patch.tobytes() for patch in first}) >= (5 if steps == ("flips",) else 24)
    for seed, epoch in ((7, 4), (8, 3)):
        seeds = transforms.sample_seeds(tf.constant(KEYS), transforms.epoch_seed(seed, epoch))
        assert (transforms.augment(image, seeds, steps).numpy() != first).any()


def test_draws_are_uniform_and_independent() -> None:
    seeds = transforms.sample_seeds(tf.range(20_000, dtype=tf.int64), transforms.epoch_seed(1, 0))
    draws = transforms.uniform(seeds, 4, 6).numpy()
    assert draws.min() >= 0
    assert draws.max() < 1
    for column in range(4):
        assert kstest(draws[:, column], "uniform").pvalue > 1e-4
    correlations = np.corrcoef(
        np.concatenate([draws, transforms.uniform(seeds, 4, 7).numpy()], axis=1).T
    )
    assert np.abs(correlations - np.eye(8)).max() < 0.04


def test_flips_give_the_eight_orientations_of_a_square() -> None:
    image = RNG.integers(0, 256, (1, 6, 6, 3), np.uint8)
    seeds = transforms.sample_seeds(tf.range(400, dtype=tf.int64), 5)
    orientations = {
        f.tobytes() for f in transforms.flip_and_turn(np.repeat(image, 400, 0), seeds).numpy()
    }
    turned = [np.rot90(image[0], k) for k in range(4)]
    assert orientations == {
        np.ascontiguousarray(t[:, ::step]).tobytes() for t in turned for step in (1, -1)
    }


def test_crop_equals_scipy() -> None:
    draws = transforms.uniform(seeds_of(), 3, 5).numpy().astype(np.float64)
    crops = transforms.random_crop(IMAGES, seeds_of(), 0.5).numpy()
    for image, (size, y, x), got in zip(IMAGES.astype(float), draws, crops, strict=True):
        share = 0.5 + 0.5 * size
        ys, xs = (corner * (1 - share) * 47 + share * np.arange(48) for corner in (y, x))
        places = np.meshgrid(ys, xs, range(3), indexing="ij")
        expected = map_coordinates(image, places, order=1, mode="nearest")
        np.testing.assert_allclose(got, expected, atol=0.05)
    np.testing.assert_array_equal(transforms.random_crop(IMAGES, seeds_of(), 1.0).numpy(), IMAGES)


def test_colour_jitter_equals_numpy_reference() -> None:
    draws = 2 * transforms.uniform(seeds_of(), 4, 6).numpy().astype(np.float64) - 1
    jittered = transforms.colour_jitter(
        IMAGES, seeds_of(), brightness=0.3, contrast=0.4, saturation=0.5, hue=0.1
    )
    for image, (b, c, s, h), got in zip(IMAGES.astype(float), draws, jittered.numpy(), strict=True):
        x = image * (1 + 0.3 * b)
        x = x.mean() + (x - x.mean()) * (1 + 0.4 * c)
        luma = (x @ [0.299, 0.587, 0.114])[..., None]
        x = luma + (x - luma) * (1 + 0.5 * s)
        about_grey = Rotation.from_rotvec(0.2 * np.pi * h * np.ones(3) / np.sqrt(3))
        expected = about_grey.apply(x.reshape(-1, 3)).reshape(x.shape)
        np.testing.assert_allclose(got, np.clip(expected, 0, 255), atol=0.05)
    same = transforms.colour_jitter(
        IMAGES, seeds_of(), brightness=0, contrast=0, saturation=0, hue=0
    )
    np.testing.assert_allclose(same, IMAGES, atol=1e-3)


def test_stain_jitter_equals_numpy_reference() -> None:
    draws = 2 * transforms.uniform(seeds_of(), 6, 7).numpy().astype(np.float64) - 1
    # Optical densities of haematoxylin, eosin and DAB in red, green and blue, as in the publication
    # of Ruifrok and Johnston.
    stains = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]])
    np.testing.assert_allclose(transforms.RUIFROK, stains, atol=1e-6)
    stains /= np.linalg.norm(stains, axis=1, keepdims=True)
    jittered = transforms.stain_jitter(IMAGES, seeds_of(), factor=0.2, shift=0.1).numpy()
    for image, draw, got in zip(IMAGES.astype(float), draws, jittered, strict=True):
        amounts = -np.log((image + 1) / 256) @ np.linalg.inv(stains)
        amounts = amounts * (1 + 0.2 * draw[:3]) + 0.1 * draw[3:]
        expected = 256 * np.exp(-(amounts @ stains)) - 1
        np.testing.assert_allclose(got, np.clip(expected, 0, 255), atol=0.05)
    same = transforms.stain_jitter(IMAGES, seeds_of(), factor=0, shift=0)
    np.testing.assert_allclose(same, IMAGES, atol=0.01)


# --- stain normalization ---------------------------------------------------------------------------------------------------


TO_LMS = np.array([[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]])
"""Matrix of Reinhard's paper."""


def lab_of(pixels: Pixels) -> Pixels:
    """Return lαβ by the single steps of the paper."""
    rgb = pixels.reshape(-1, 3).astype(float) + 1
    L, M, S = np.log10(TO_LMS @ rgb.T)  # noqa: N806 - the paper's names
    return np.stack(
        [(L + M + S) / np.sqrt(3), (L + M - 2 * S) / np.sqrt(6), (L - M) / np.sqrt(2)], axis=1
    )


def test_reinhard_equals_numpy_reference() -> None:
    fit = fit_pixels(IMAGES[0].reshape(-1, 3), where="i")
    tissue = (-np.log((IMAGES[0] + 1.0) / 256) > 0.15).all(axis=-1)
    lab = lab_of(IMAGES[0][tissue])
    np.testing.assert_allclose(fit.reinhard_mean, lab.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(fit.reinhard_std, lab.std(axis=0), atol=1e-5)
    changes = tf.constant(transforms.reinhard_changes(fit, transforms.REFERENCE)[None], tf.float32)
    lab = (lab_of(IMAGES[0]) - fit.reinhard_mean) / fit.reinhard_std
    lab = lab * transforms.REFERENCE.reinhard_std + transforms.REFERENCE.reinhard_mean
    # Invert the equations of the paper with a linear solver.
    l, a, b = (lab / [np.sqrt(3), np.sqrt(6), np.sqrt(2)]).T  # noqa: E741 - the paper's names
    lms = 10 ** np.stack([l + a + b, l + a - b, l - 2 * a])
    expected = np.clip(np.linalg.solve(TO_LMS, lms).T - 1, 0, 255).reshape(48, 48, 3)
    got = transforms.reinhard(IMAGES[:1], changes).numpy()[0]
    np.testing.assert_allclose(got, expected, atol=0.1)


def test_macenko_finds_the_stains_of_a_synthetic_image() -> None:
    pixels = he_image(400).reshape(-1, 3)
    fit = fit_pixels(pixels, where="i")
    angles = np.degrees(np.arccos((fit.macenko_stains * STAINS).sum(axis=1)))
    assert angles.max() < 4  # the 1st and 99th percentile are slightly inside
    np.testing.assert_allclose(np.linalg.norm(fit.macenko_stains, axis=1), 1, atol=1e-6)
    density = -np.log((pixels + 1.0) / 256)
    density = density[(density > 0.15).all(axis=1)]
    amounts = np.linalg.lstsq(fit.macenko_stains.T.astype(float), density.T, rcond=None)[0]
    np.testing.assert_allclose(fit.macenko_maximum, np.percentile(amounts, 99, axis=1), rtol=1e-4)


def test_macenko_equals_numpy_reference() -> None:
    fit = fit_pixels(IMAGES[0].reshape(-1, 3), where="i")
    got = transforms.macenko(
        IMAGES[:1],
        tf.constant(transforms.macenko_changes(fit, transforms.REFERENCE)[None], tf.float32),
    )
    density = -np.log((IMAGES[0].reshape(-1, 3) + 1.0) / 256)
    amounts = np.linalg.lstsq(fit.macenko_stains.T.astype(float), density.T, rcond=None)[0]
    amounts *= (transforms.REFERENCE.macenko_maximum / fit.macenko_maximum)[:, None]
    light = 256 * np.exp(-(transforms.REFERENCE.macenko_stains.T.astype(float) @ amounts)).T - 1
    np.testing.assert_allclose(got.numpy()[0], np.clip(light, 0, 255).reshape(48, 48, 3), atol=0.1)


def test_dataset_is_normalized_by_fits_that_are_read_back_unchanged(
    small_store: Path, tmp_path: Path
) -> None:
    fitted = Path(shutil.copytree(small_store, tmp_path / "s.lmdb"))
    histopipe.stains(fitted)
    methods: tuple[StainNorm, ...] = ("macenko", "reinhard")
    with Store(fitted) as store:
        fits = {number: fit_slide(store, number).to_json() for number in store.complete}
        assert {number: fit.to_json() for number, fit in store.stains().items()} == fits
        normalizers = {name: transforms.stain_normalizer([store], name) for name in methods}
    plain = histopipe.load_dataset(small_store, batch_size=32, seed=1)
    for method, normalize in normalizers.items():
        normal = histopipe.load_dataset(fitted, batch_size=32, seed=1, stain_norm=method)
        for before, after in itertools.islice(zip(plain, normal, strict=True), 3):
            assert after["image"].dtype == tf.uint8
            expected = transforms.to_uint8(normalize(before["image"], before["key"]))
            np.testing.assert_array_equal(after["image"], expected)
            assert (after["image"].numpy() != before["image"].numpy()).any()


def test_slides_without_stain_fit_are_reported(small_store: Path, tmp_path: Path) -> None:
    """A training is refused, and leaves no folder, as for other wrong settings."""
    with pytest.raises(
        NothingToDo, match=r"found \S+, \S+, \S+ and 9 more; run `histopipe stains "
    ):
        histopipe.load_dataset(small_store, batch_size=4, seed=1, stain_norm="macenko")
    with pytest.raises(UsageError, match="stain_norm: found 'vahadane'"):
        histopipe.load_dataset(small_store, batch_size=4, seed=1, stain_norm="vahadane")  # type: ignore[arg-type]
    wrong: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (UsageError, "augment", {"augment": "blur"}),
        (UsageError, "augment", {"augment": ("none", "flips")}),
        (UsageError, "max-per-slide", {"max_per_slide": -1}),
        (UsageError, "shuffle-block", {"shuffle_block": -1}),
        (UsageError, "balance", {"balance": "class", "shuffle_block": 5}),
        (UsageError, "class-weights", {"balance": "class", "class_weights": "balanced"}),
        (NothingToDo, "run `histopipe stains", {"stain_norm": "macenko", "in_process": True}),
    )
    for error, message, settings in wrong:
        with pytest.raises(error, match=message):
            histopipe.train(small_store, out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_stains_command(tmp_path: Path, run: RunCommand) -> None:
    """Noise counts as tissue. White images have no tissue."""
    white = [bytes(simplejpeg.encode_jpeg(np.full((16, 16, 3), 250, np.uint8)))] * 3
    path = a_store(tmp_path / "patches.lmdb", {"noise": jpegs(0, 30), "white": white, "xempty": []})
    for flags, measured in (([], "1 slide"), ([], "0 slides"), (["--force"], "1 slide")):
        done = run("stains", *flags)
        assert (done.returncode, done.stdout) == (3, f"{measured} measured, 1 failed\n")
        message = "slide white: pixels of stained tissue: found 0, expected at least 1,000"
        assert message in done.stderr
    with Store(path) as store:
        assert set(store.stains()) == {0}
    with StoreWriter(path, SPEC) as writer:  # a restart removes the pixels and the stain fit
        writer.restart(0, writer.record(0))
        writer.update(0, writer.record(1))
    with Store(path) as store:
        assert store.stains() == {}


def test_damaged_fit_and_too_little_tissue_are_refused() -> None:
    good = fit_pixels(IMAGES.reshape(-1, 3), where="i").to_json()
    assert StainFit.from_json(good, where="here").pixels == good["pixels"]
    changes = {"pixels": "x", "reinhard_mean": [1], "macenko_maximum": [1, math.nan]}
    for wrong in (
        None,
        *(good | {name: value} for name, value in changes.items()),
        *({k: v for k, v in good.items() if k != name} for name in changes),
    ):
        with pytest.raises(DamagedStore, match="here"):
            StainFit.from_json(wrong, where="here")
    with pytest.raises(TooLittleTissue, match="slide x: pixels of stained tissue: found 0"):
        fit_pixels(np.full((5000, 3), 240, np.uint8), where="slide x")
