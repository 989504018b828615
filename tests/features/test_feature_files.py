"""Test what is read of feature files of other tools: places, the side of patches, and sets of features."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import anndata
import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import histopipe
from histopipe.errors import NothingToDo, SlideUnreadable, UsageError
from histopipe.features.feature_file import read_coords, read_features, read_header, read_places
from histopipe.features.feature_sets import SlideFeatures
from histopipe.ingestion.coords import read_corners
from histopipe.predictions.patch_values import check_geometry
from histopipe.predictions.sources import PredictedSlide
from histopipe.system.output import Progress

VALUES = np.arange(24, dtype=np.float32).reshape(6, 4)
PLACES = np.array([(512 * i, 1024 * j) for j in range(2) for i in range(3)])


def write(
    path: Path,
    places: Any = PLACES,
    *,
    values: Any = VALUES,
    name: str = "features",
    of_file: Any = None,
    of_coords: Any = None,
) -> Path:
    """Write a feature file with attributes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file[name] = values
        if places is not None:
            file["coords"] = places
            file["coords"].attrs.update(of_coords or {})
        file.attrs.update(of_file or {})
    return path


@pytest.mark.parametrize(
    ("of_file", "of_coords", "side"),
    [
        ({}, {"patch_size_level0": 512, "patch_size": 256}, 512),
        ({"patch_size_level0": 512, "patch_size": 256}, {}, 512),
        ({}, {"patch_size": 256, "patch_level": 1, "downsample": np.array([4.0, 4.0])}, 1024),
        ({}, {"patch_size": 256, "level0_magnification": 40, "target_magnification": 20}, 512),
        ({"unit": "um", "tile_size_um": 256.0}, {}, 256),
        ({}, {"patch_size": 256, "patch_level": 1}, 0),
        ({"patch_size_level0": "unknown"}, {}, 0),
        ({"tile_size_um": 256.0}, {}, 256),
        ({"patch_size_level0": -1.0}, {}, 0),
        (
            {"patch_size_level0": np.zeros(0), "patch_size": [256, 256], "downsample": [2.0, 2.0]},
            {},
            512,
        ),
    ],
    ids=[
        "TRIDENT",
        "AtlasPatch",
        "CLAM",
        "magnification",
        "STAMP",
        "level",
        "text",
        "STAMP without unit",
        "negative",
        "arrays",
    ],
)
def test_side_is_read_in_each_form(
    tmp_path: Path, of_file: Any, of_coords: Any, side: float
) -> None:
    header = read_header(write(tmp_path / "a.h5", of_file=of_file, of_coords=of_coords))
    assert header.recorded_side == side
    assert header.side == (side or 512)  # else that of the neighbours


@given(
    st.integers(1, 900), st.integers(0, 50), st.lists(st.integers(0, 99), min_size=12, unique=True)
)
def test_distance_of_neighbours(
    tmp_path_factory: pytest.TempPathFactory, side: int, shift: int, cells: list[int]
) -> None:
    """Of any patches of a grid with neighbours, in any order; a copy of a patch and a second grid change nothing."""
    grid = np.array([(cell % 10 * side, cell // 10 * side + shift) for cell in cells])
    neighbours = [[0, shift], [side, shift], [2 * side, shift], [0, side + shift]]
    places = np.concatenate([grid, neighbours, grid[:1], [[shift + 7, 10**6]]])
    path = write(tmp_path_factory.mktemp("f") / "a.h5", places, values=np.ones((len(places), 2)))
    assert read_header(path).side == side


def test_side_without_neighbours_is_unknown(tmp_path: Path) -> None:
    for places in (
        [(5, 5)],
        [(0, 0), (512, 300)],
        [(0, 0), (5120, 0), (9, 9999)],
        np.zeros((0, 2)),
        [(3, 3), (3, 3)],
    ):
        values = np.ones((len(places), 4))
        header = read_header(write(tmp_path / "a.h5", np.array(places), values=values))
        assert (header.side, header.unplaced) == (0, "")
    with pytest.raises(UsageError, match="no attribute patch_size_level0"):
        SlideFeatures((header,)).positions()


@pytest.mark.parametrize(
    ("places", "of_file", "unplaced"),
    [
        (PLACES * 1.0, {}, ""),
        (PLACES, {"unit": "px"}, ""),
        (PLACES + 0.7, {}, "coords such as 0.7"),
        (np.where(PLACES == 512, np.nan, PLACES), {}, "coords such as nan"),
        (np.where(PLACES == 512, 1e19, PLACES), {}, "coords such as 1e+19"),
        (PLACES * 0.5, {"unit": "um"}, "coords in um"),
        (PLACES, {"unit": b"mm"}, "coords in mm"),
        (None, {}, "no coords"),
        (np.hstack([PLACES, np.full((6, 3), 512)]), {}, ""),
        (PLACES[None], {}, ""),
    ],
)
def test_no_place_is_cut(tmp_path: Path, places: Any, of_file: Any, unplaced: str) -> None:
    """Places are whole level-0 pixels, or none; the features are read all the same."""
    path = write(tmp_path / "x" / "a.h5", places, of_file=of_file)
    header = read_header(path)
    assert header.unplaced == unplaced
    assert np.array_equal(read_features(header), VALUES)
    coords = read_coords(header)
    if unplaced:
        assert coords is None
        with pytest.raises(UsageError, match=re.escape(unplaced)):
            SlideFeatures((header,)).positions()
    else:
        assert coords is not None and np.array_equal(coords, PLACES)
    if places is not None:
        expected = np.reshape(places, (6, -1))[:, :2]
        assert np.array_equal(read_places(header), expected, equal_nan=True)
    done = histopipe.export(tmp_path / "x", tmp_path / "h5ad", to="h5ad", progress=Progress())
    if places is None or "nan" in unplaced:
        assert unplaced in done.to_json()["failed"]["a"]
        return
    adata = anndata.read_h5ad(tmp_path / "h5ad" / "a.h5ad")
    unit = unplaced.partition("coords in ")[2] or "l0"
    columns = adata.obs[[f"x_{unit}", f"y_{unit}"]].to_numpy()
    assert np.array_equal(columns, expected, equal_nan=True)
    assert set(adata.obs["side_from"]) <= {"neighbours", "unknown"}


def test_coordinates_for_a_store_are_never_cut(tmp_path: Path) -> None:
    for number, (places, of_coords, message) in enumerate(
        [
            (PLACES + 0.7, {}, "found coords such as 0.7, expected whole level-0 pixels"),
            (PLACES, {"unit": "um"}, "found coords in um"),
            (np.array([[b"1", b"2"]] * 6), {}, "expected numbers"),
        ]
    ):
        path = write(tmp_path / f"{number}.h5", places, of_coords=of_coords)
        with pytest.raises(SlideUnreadable, match=message):
            read_corners(path)
    path = write(tmp_path / "whole.h5", PLACES * 1.0)
    assert np.array_equal(read_corners(path), PLACES)


def test_names_of_observations_are_unique_and_an_unknown_side_is_said(tmp_path: Path) -> None:
    write(tmp_path / "f" / "a.h5", np.array([(7, 7)] * 3 + [(1, 1)] * 3))
    messages: list[str] = []
    progress = mock.Mock(Progress(), message=messages.append)
    progress.bar = Progress().bar
    histopipe.export(tmp_path / "f", tmp_path / "o", to="h5ad", progress=progress)
    adata = anndata.read_h5ad(tmp_path / "o" / "a.h5ad")
    assert adata.obs_names.tolist() == [f"a_{n}_{n}{c}" for n in (7, 1) for c in ("", "-1", "-2")]
    assert adata.obs["side_l0"].isna().all() and (adata.obs["side_from"] == "unknown").all()
    assert np.array_equal(adata.obsm["spatial"], adata.obs[["x_l0", "y_l0"]])  # corners
    assert messages == ["the side of the patches of 1 slide is unknown, and places are corners: a"]
    size: Any = {"width": 9, "height": 9, "bounds": [0, 0, 9, 9], "mpp": None, "mpp_source": None}
    slide = PredictedSlide(
        slide="a", patient="a", label=None, **size, size_l0=0, stride_l0=0, source=""
    )
    with pytest.raises(NothingToDo, match="slide a: the side of its patches is unknown"):
        check_geometry(slide)


def test_sets_of_features(tmp_path: Path) -> None:
    """float64 is read as float32; one named set is read, of several the names are shown; `feats` is STAMP's name."""
    header = read_header(write(tmp_path / "a.h5", values=VALUES.astype(np.float64)))
    for rows in (None, np.array([1, 4])):
        read = read_features(header, rows)
        assert read.dtype == np.float32
        assert np.array_equal(read, VALUES if rows is None else VALUES[rows])
    for name in ("features/uni_v1", "feats"):
        path = write(tmp_path / "b.h5", name=name, of_file={"feat_type": "tile"})
        header = read_header(path)
        assert np.array_equal(read_features(header), VALUES) and header.level == "patch"
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["features/uni"], file["features/gigapath"] = VALUES, VALUES
    with pytest.raises(
        UsageError, match="several sets of features: found features/gigapath, features/uni"
    ):
        read_header(tmp_path / "b.h5")
