"""Several feature sets in one bag, joined by position."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.bags import a_bag, write_bag
from histopipe.dataset.bags import BagSet, read_bag
from histopipe.dataset.batches import BagBatches
from histopipe.dataset.sampling import Order
from histopipe.dataset.selection import SampleTable, select
from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.features.feature_file import read_header
from histopipe.features.feature_sets import covering
from histopipe.pretrained.presets import slide_preset
from histopipe.runs.task_config import (
    FORMER,
    changed_config,
    load_config,
    make_config,
)
from histopipe.slides.tables import read_labels
from histopipe.system.settings import to_toml

corners = st.lists(st.tuples(st.integers(-9, 60), st.integers(-9, 60)), max_size=25)


@given(
    patch_corners=corners,
    side=st.integers(1, 12),
    other_corners=corners,
    other_side=st.integers(1, 30),
)
def test_covering_patches_are_those_of_a_full_search(
    patch_corners: list[tuple[int, int]],
    side: int,
    other_corners: list[tuple[int, int]],
    other_side: int,
) -> None:
    expected = []
    for x, y in patch_corners:
        centre, best, nearest = (x + side / 2, y + side / 2), -1, np.inf
        for row, (left, top) in enumerate(other_corners):
            offset = centre[0] - left, centre[1] - top
            away = sum((distance - other_side / 2) ** 2 for distance in offset)
            if all(0 <= distance < other_side for distance in offset) and away < nearest:
                best, nearest = row, away
        expected.append(best)
    here, there = (
        np.array(each, np.int64).reshape(-1, 2) for each in (patch_corners, other_corners)
    )
    assert covering(here, side, there, other_side).tolist() == expected


GRID = 512 * np.stack(np.meshgrid(np.arange(8), np.arange(4)), axis=-1).reshape(-1, 2)
"""Corners of the fine patches of a slide."""


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    """Two magnifications of 14 slides: patches of 512 and 2,048 pixels. Slide 3 lacks a coarse patch, 4 its file."""
    fine, coarse = tmp_path / "fine", tmp_path / "coarse"
    for i in range(14):
        write_bag(fine / f"s{i}.h5", a_bag(i, len(GRID), positive=i % 2 == 1), GRID)
        wide = 2048 * np.array([(0, 0), (1, 0)])[: 1 if i == 3 else 2]
        if i != 4:
            values = np.arange(2 * len(wide), dtype=np.float16).reshape(-1, 2)
            write_bag(coarse / f"s{i}.h5", values, wide)
            with h5py.File(coarse / f"s{i}.h5", "r+") as file:
                file["coords"].attrs["patch_size_level0"] = 2048
    rows = (f"s{i},{'np'[i % 2]},P{i}\n" for i in range(14))
    (fine / "labels.csv").write_text("slide,label,patient\n" + "".join(rows))
    return fine, coarse


def test_sets_are_joined_by_position(sets: tuple[Path, Path]) -> None:
    bags = BagSet(sets, labels=partial(read_labels, sets[0] / "labels.csv"), columns=())
    assert bags.dimension == 14
    by_name = {bag.id: bag for bag in bags}
    assert by_name.keys() == {f"s{i}" for i in range(14) if i != 4}
    assert any("s4" in note for note in bags.notes)
    assert any(note.startswith("16 patches") for note in bags.notes)
    whole = read_bag(by_name["s0"], np.dtype(np.float32))
    wide = np.where(GRID[:, :1] < 2048, [[0, 1]], [[2, 3]])
    np.testing.assert_array_equal(whole, np.hstack([a_bag(0, 32, positive=False), wide]))
    some = np.array([1, 5, 31])
    np.testing.assert_array_equal(read_bag(by_name["s0"], np.dtype(np.float32), some), whole[some])
    short, covered = by_name["s3"], GRID[GRID[:, 0] < 2048]
    np.testing.assert_array_equal(short.parts[0].corners(), covered)
    assert short.rows == 16
    assert {p[:4] for p in short.places()} == {("s3", x, y, "512") for x, y in covered.tolist()}
    one = BagSet(sets[0], labels=partial(read_labels, sets[0] / "labels.csv"))
    assert bags.uuid != one.uuid
    assert {bag.id: bag.crc for bag in one}["s0"] != by_name["s0"].crc


def test_two_encoders_of_the_same_patches_are_concatenated(
    sets: tuple[Path, Path], tmp_path: Path
) -> None:
    other, labels = tmp_path / "other", sets[0] / "labels.csv"
    narrow = [a_bag(i + 50, 32, positive=False)[:, :5] for i in range(14)]
    for i, values in enumerate(narrow):
        write_bag(other / f"s{i}.h5", values, GRID)
    both = BagSet((sets[0], other), labels=partial(read_labels, labels))
    assert both.notes == ()
    expected = np.hstack([a_bag(0, 32, positive=False), narrow[0]])
    np.testing.assert_array_equal(read_bag(both.complete[0], np.dtype(np.float32)), expected)
    table = SampleTable(select([both]))
    batches = BagBatches(
        both, table, batch_size=2, order=Order(len(table)), most=10, positions=True
    )
    features, ends, *_, positions = batches.load(0).values()
    assert (features.shape, ends.tolist(), positions.shape) == ((20, 17), [10, 20], (20, 2))
    assert positions.max() <= 7
    os.truncate(other / "s0.h5", 900)
    with pytest.raises(DamagedStore, match=r"s0\.h5"):
        BagSet((sets[0], other), labels=partial(read_labels, labels))


def test_sets_that_do_not_fit_are_refused(sets: tuple[Path, Path], tmp_path: Path) -> None:
    (fine, coarse), far, bare = sets, tmp_path / "far", tmp_path / "bare"
    write_bag(far / "s0.h5", np.zeros((3, 2), np.float32), np.full((3, 2), 9_000_000))
    write_bag(bare / "s0.h5", np.zeros((3, 2), np.float32))
    with h5py.File(coarse / "s0.h5", "r+") as file:
        del file["coords"].attrs["patch_size_level0"]
    for other, message in (
        (fine, "given twice"),
        (far, "no slide has patches in all"),
        (bare, "no coords"),
        (coarse, "side of the patches"),
    ):
        with pytest.raises((UsageError, NothingToDo), match=message):
            BagSet((fine, other))


def test_settings_hold_several_folders(tmp_path: Path) -> None:
    one: Any = make_config({"mil": "a"})
    two: Any = make_config({"mil": ["a", Path("b")]})
    assert (one.mil, two.mil) == (("a",), ("a", "b"))
    (tmp_path / "config.toml").write_text(to_toml(two))
    assert load_config(tmp_path / "config.toml") == two
    (tmp_path / "config.toml").write_text('mil = "a"\n')  # written by earlier versions
    assert load_config(tmp_path / "config.toml") == changed_config(one, **FORMER)
    with pytest.raises(UsageError, match="no folder"):
        make_config({"mil": []})


def test_damaged_headers_are_left_out_with_a_reason(tmp_path: Path) -> None:
    for name in "abc":
        write_bag(tmp_path / f"{name}.h5", a_bag(0, 3, positive=True))
    os.truncate(tmp_path / "b.h5", (tmp_path / "b.h5").stat().st_size // 2)
    with pytest.raises(DamagedStore, match=r"b\.h5"):
        BagSet(tmp_path)
    (tmp_path / "labels.csv").write_text("slide,label\na,x\nb,y\nc,y\n")
    bags = BagSet(tmp_path, labels=partial(read_labels, tmp_path / "labels.csv"), on_error="skip")
    assert [bag.id for bag in bags] == ["a", "c"]
    assert list(bags.failed) == ["b"]
    assert any("left out" in note and "b.h5" in note for note in bags.notes)


@pytest.mark.parametrize(
    ("coords", "attributes", "side"),
    [
        ({"patch_size": 512, "target_magnification": 20}, {}, 256.0),  # TRIDENT
        ({"patch_size": 256, "target_magnification": "40x"}, {}, 0.0),
        ({"patch_size": 256}, {"tile_size_um": 448.0}, 448.0),  # STAMP
        ({"patch_size": 256, "patch_level": 1}, {}, 0.0),  # CLAM
        ({}, {"patch_size": [256], "target_magnification": np.array([20])}, 128.0),  # AtlasPatch
        ({"patch_size": 256, "target_magnification": 0}, {}, 0.0),
    ],
)
def test_slide_encoders_need_patches_of_their_scale(
    coords: dict[str, Any],
    attributes: dict[str, Any],
    side: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of files of other tools, which have no record of an encoder. A scale that only some files have is warned of."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"], file["coords"] = np.zeros((2, 768), np.float32), np.zeros((2, 2), int)
        file["coords"].attrs.update(coords)
        file.attrs.update(attributes)
    assert read_header(tmp_path / "a.h5").side_um == side
    for name, needed in (("titan", 256), ("chief", 256), ("feather-uni", 128)):
        preset = slide_preset(name)
        assert preset is not None
        arguments: Any = None, preset.slide_network.features, tmp_path
        if side and side != needed:
            with pytest.raises(
                UsageError, match=rf"{name}: found patches of {side:g} µm, .* {needed} µm"
            ):
                preset.check_features(*arguments, sides_um=[side, 0], allowed=False)
            assert preset.check_features(*arguments, sides_um=[side], allowed=True)
        else:
            assert preset.check_features(*arguments, sides_um=[side], allowed=False) is None
            capsys.readouterr()
            assert preset.check_features(*arguments, sides_um=[side, 0], allowed=False) is None
            assert "the scale of its patches" in capsys.readouterr().err
