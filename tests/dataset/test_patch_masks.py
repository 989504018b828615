"""Masks of patches: they show the same areas, at the same places, in every form in which they are loaded."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from PIL import Image

from helpers.lazy import tf
from helpers.masked import EXTENT, GRID, SCALE, SIDE, geojson, planted, planted_store
from helpers.trainings import in_tensorflow
from histopipe.annotations.regions import Outline
from histopipe.annotations.rules import NOT_ANNOTATED, PixelRules
from histopipe.dataset.patch_masks import MaskedStore, check_copy, open_stores, write_copy
from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.measure.patch_labels import Coverage


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return planted_store(tmp_path_factory.mktemp("planted"))


def masked(store: Path, masks: Path, stack: ExitStack, **rules: Any) -> MaskedStore:
    (opened,) = open_stores([store], masks, PixelRules(**rules), stack=stack)
    assert isinstance(opened, MaskedStore)
    return opened


def dice(a: np.ndarray, b: np.ndarray) -> float:
    return float(2 * (a & b).sum() / (a.sum() + b.sum()))


def test_masks_show_the_areas_that_are_in_the_pixels(stored: tuple[Path, Path]) -> None:
    """A mask that is shifted by two pixels, mirrored, or of another slide would fail."""
    with ExitStack() as stack:
        store = masked(*stored, stack, annotated_area="all")
        gland = store.classes.index("gland")
        agreement = []
        for number, record in store.complete.items():
            for row in range(record.planned):
                dark = store.read(record.id, row).mean(axis=2) < 160
                mask = store.mask(number, row) == gland
                if mask.sum() > 100:
                    agreement.append(dice(mask, dark))
                    wrong = np.roll(mask, 2, axis=1), mask[:, ::-1], mask.T, mask[::-1]
                    assert all(dice(each, dark) < agreement[-1] - 0.005 for each in wrong)
                else:
                    assert abs(int(mask.sum()) - int(dark.sum())) < 10
        other = store.mask(0, 4) == gland, store.read("s1", 4).mean(axis=2) < 160
    assert min(agreement) > 0.97 and len(agreement) > 20
    assert dice(*other) < 0.9


def test_pixels_of_each_class_are_those_that_annotate_covers(stored: tuple[Path, Path]) -> None:
    with ExitStack() as stack:
        store = masked(*stored, stack)
        for number, masks in store.masks.items():
            index, side = store.index(number), store.records[number].side_l0
            outlines = [Outline("x", "gland", planted(number))]
            (shares,) = Coverage(outlines, ["gland"]).shares(index["x_l0"], index["y_l0"], side)
            pixels = masks.counts[:, 0] / SIDE**2
            # The pixels on a boundary of at most 200 pixels of a patch, each by half of its area.
            assert np.abs(pixels - shares[:, 0]).max() < 0.01
            assert masks.counts.sum() == store.records[number].patch_labels["gland"]


def test_a_patch_has_the_rarest_of_its_classes(stored: tuple[Path, Path]) -> None:
    with ExitStack() as stack:
        store = masked(*stored, stack, annotated_area="all")
        assert store.classes == ["background", "gland"]
        for number, masks in store.masks.items():
            gland = masks.counts[:, 1] >= 0.05 * SIDE**2
            assert store.index(number)["label"].tolist() == gland.astype(int).tolist()
        (opened,) = open_stores([stored[0]], stored[1], PixelRules(), stack=stack)
        labels = opened.index(0)["label"]
        assert {*labels.tolist()} == {-1, 0}  # patches without an outline have no class


@in_tensorflow
def test_load_dataset_yields_patches_and_masks(stored: tuple[Path, Path]) -> None:
    from histopipe import load_dataset

    store, masks = stored
    dataset = load_dataset(store, batch_size=7, seed=1, masks=masks, annotated_area="all")
    assert dataset.classes == ["background", "gland"]
    agreement = []
    for batch in dataset:
        assert batch["mask"].shape == (7, SIDE, SIDE) and batch["mask"].dtype == tf.uint8
        dark = tf.reduce_mean(tf.cast(batch["image"], tf.float32), axis=-1) < 160
        for image, mask, weight in zip(dark.numpy(), batch["mask"], batch["weight"], strict=True):
            if weight and (mask := mask.numpy() == 1).sum() > 100:
                agreement.append(dice(image, mask))
    assert min(agreement) > 0.97 and len(agreement) > 20
    image, mask, weight = next(
        iter(load_dataset(store, batch_size=4, seed=1, masks=masks, as_supervised=True))
    )
    assert (image.shape, mask.shape, weight.shape) == (
        (4, SIDE, SIDE, 3),
        (4, SIDE, SIDE),
        (4, 1, 1),
    )
    assert {*np.unique(mask)} == {0, NOT_ANNOTATED}


@in_tensorflow
def test_keras_trains_on_masks_and_ignores_what_is_not_annotated(stored: tuple[Path, Path]) -> None:
    import keras

    from histopipe import load_dataset

    store, masks = stored
    batches = load_dataset(
        store, batch_size=9, seed=1, masks=masks, annotated_area="3", as_supervised=True
    )
    model = keras.Sequential(
        [keras.Input((SIDE, SIDE, 3)), keras.layers.Conv2D(2, 1, activation="softmax")]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(ignore_class=NOT_ANNOTATED))
    assert np.isfinite(model.fit(batches, verbose=0, shuffle=False).history["loss"]).all()


@in_tensorflow
@pytest.mark.parametrize("steps", [("flips",), ("crop",), ("flips", "crop")])
def test_augmentation_moves_patches_and_masks_alike(steps: Any) -> None:
    from histopipe.dataset.transforms import augment, augment_masks

    masks = np.zeros((64, SIDE, SIDE), np.uint8)
    rng = np.random.default_rng(1)
    for mask in masks:
        x, y = rng.integers(2, 18, 2)
        mask[y : y + 10, x : x + 6] = 1
    images = np.repeat(masks[..., None] * np.uint8(200), 3, axis=-1)
    seeds = tf.constant(np.arange(64))
    moved = np.asarray(augment(images, seeds, steps))[..., 0] > 100
    planes = augment_masks(tf.constant(masks), seeds, steps)
    assert planes.dtype == tf.uint8
    assert (moved != (planes.numpy() == 1)).mean() < 0.004  # nearest pixels, and interpolated ones
    assert len({plane.tobytes() for plane in planes.numpy()}) > 50
    if steps == ("flips",):
        assert np.array_equal(moved, planes.numpy() == 1)


def test_label_images_have_the_same_masks(stored: tuple[Path, Path], tmp_path: Path) -> None:
    store, masks = stored
    places = np.arange(EXTENT) + 0.5
    for number in range(6):
        inside = shapely.contains_xy(planted(number), *np.meshgrid(places, places))
        Image.fromarray(inside.astype(np.uint8) * 7).save(tmp_path / f"s{number}.png")
    with ExitStack() as stack:
        by_outline = masked(store, masks, stack, annotated_area="all")
        by_image = masked(store, tmp_path, stack, annotated_area="all", mask_values=("7=gland",))
        different = sum(
            int((by_outline.mask(n, row) != by_image.mask(n, row)).sum())
            for n in range(6)
            for row in range(GRID**2)
        )
    # The centre of a pixel of a patch is a corner of four pixels of level 0.
    assert SCALE == 2 and different < 0.01 * 6 * (SIDE * GRID) ** 2


@pytest.fixture
def copied(stored: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return a copy of the annotations, and the copy that a run made of it."""
    originals, copy = tmp_path / "originals", tmp_path / "run" / "annotations"
    originals.mkdir()
    for path in stored[1].iterdir():
        (originals / path.name).write_bytes(path.read_bytes())
    copy.parent.mkdir()
    with ExitStack() as stack:
        write_copy([masked(stored[0], originals, stack)], copy)
    return originals, copy


def test_a_run_keeps_the_files_that_it_used(
    copied: tuple[Path, Path], stored: tuple[Path, Path]
) -> None:
    originals, copy = copied
    check_copy(copy, originals, PixelRules())
    index = json.loads((copy.parent / "annotations.json").read_text())
    assert index["classes"] == ["gland"] and len(index["slides"]) == 6
    with ExitStack() as stack:
        first, again = (masked(stored[0], folder, stack) for folder in (originals, copy))
        assert all(
            np.array_equal(first.mask(n, row), again.mask(n, row))
            for n in range(6)
            for row in range(GRID**2)
        )
        assert index["slides"]["s3"]["pixels"] == first.records[3].patch_labels
    for path in originals.iterdir():
        path.unlink()
    originals.rmdir()
    check_copy(copy, originals, PixelRules())


def test_other_annotations_are_refused_with_the_name_of_the_slide(
    copied: tuple[Path, Path],
) -> None:
    originals, copy = copied
    path = originals / "s2.geojson"
    path.write_text(geojson(("gland", shapely.box(0, 0, 9, 9))))
    with pytest.raises(UsageError, match="slide s2 has other annotations"):
        check_copy(copy, originals, PixelRules())
    path.unlink()
    with pytest.raises(UsageError, match=r"slide s2 .*no file"):
        check_copy(copy, originals, PixelRules())
    check_copy(copy, copy, PixelRules())  # the way out that the message names
    (copy / "s4.geojson").write_text("{}")
    with pytest.raises(DamagedStore, match="s4"):
        check_copy(copy, copy, PixelRules())


@pytest.mark.parametrize("content", ["nothing", "ignored", "nameless", "tiny", "far"])
def test_one_file_without_an_annotated_pixel_is_left_out(
    stored: tuple[Path, Path], tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other slides, and the numbers of their classes, are unchanged."""
    for path in stored[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    areas: dict[str, tuple[tuple[str | None, shapely.Geometry], ...]] = {
        "nothing": (),
        "ignored": (("Ignore*", planted(0)),),
        "nameless": ((None, planted(0)),),
        "tiny": (("a tiny one", shapely.box(10.1, 10.1, 10.2, 10.2)),),
        "far": (("other", shapely.box(1, 1, 5, 5)), ("zzz", shapely.box(10.1, 10.1, 10.2, 10.2))),
    }
    (tmp_path / "s0.geojson").write_text(geojson(*areas[content]))
    with ExitStack() as stack:
        store, whole = masked(stored[0], tmp_path, stack), masked(*stored, stack)
        gland = store.classes.index("gland")
        assert store.classes == (["gland", "other"] if content == "far" else ["gland"])
        for number in range(1, 6):
            for row in range(GRID**2):
                same = (store.mask(number, row) == gland) == (whole.mask(number, row) == 0)
                assert same.all()
        if content != "far":
            assert (store.mask(0, 4) == NOT_ANNOTATED).all() and not store.records[0].patch_labels
            assert {*store.index(0)["label"].tolist()} == {-1}
            assert "left out: s0" in capsys.readouterr().err


def test_values_that_no_label_image_has_are_no_classes(
    stored: tuple[Path, Path], tmp_path: Path
) -> None:
    for number in range(6):
        values = np.zeros((EXTENT, EXTENT), np.uint8)
        values[:40] = 3
        Image.fromarray(values).save(tmp_path / f"s{number}.png")
    with ExitStack() as stack:
        rules = {"annotated_area": "all", "mask_values": ("1=gland", "2=fat", "3=stroma")}
        store = masked(stored[0], tmp_path, stack, **rules)
        assert store.classes == ["background", "stroma"]
        assert {*np.unique(store.mask(0, 0))} == {0, 1}


def test_more_classes_than_numbers_are_refused(stored: tuple[Path, Path], tmp_path: Path) -> None:
    names = tuple((f"c{number}", planted(0)) for number in range(256))
    (tmp_path / "s0.geojson").write_text(geojson(*names))
    with ExitStack() as stack, pytest.raises(UsageError, match="found 256, expected at most 255"):
        masked(stored[0], tmp_path, stack)


def test_annotations_that_cannot_be_used(stored: tuple[Path, Path], tmp_path: Path) -> None:
    store = stored[0]
    with ExitStack() as stack:
        with pytest.raises(UsageError, match="does not exist"):
            masked(store, tmp_path / "none", stack)
        (tmp_path / "s0.geojson").write_text(geojson((None, planted(0))))
        with pytest.raises(NothingToDo, match="no pixel of any patch"):
            masked(store, tmp_path, stack)
        (tmp_path / "s0.geojson").write_text(geojson(("gland", shapely.box(900, 900, 950, 950))))
        with pytest.raises(UsageError, match=r"s0\.geojson seems to be of another slide"):
            masked(store, tmp_path, stack)
        with pytest.raises(UsageError, match="classes"):
            open_stores([store], stored[1], PixelRules(), stack=stack, classes=["tumour"])
