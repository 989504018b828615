"""Test amounts of stains: against scikit-image, planted shares, and real slides."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import tifffile
from click.testing import CliRunner

from helpers.slides import CMU, TCGA
from histopipe.cli import histopipe
from histopipe.errors import UsageError
from histopipe.exporting.export import export
from histopipe.ingestion.ingest import ingest
from histopipe.measure.staining import (
    _HD,
    _HED,
    find_stains,
    measure_pixels,
    stain_matrix,
    stains,
    white_point,
)
from histopipe.reports.heatmap import heatmap
from histopipe.store.store import Store
from histopipe.system.output import Progress

WHITE = np.full(3, 255.0)
EXPECTED = [
    [[0.0142535975, 0.0320787706, 0.0224988092], [0.1085412223, 0.0220292654, 0.0121818596], [0.0259502170, 0.0, 0.1438576720], [0.0054516362, 0.0, 0.0033144513]],
    [[0.0353515200, 0.0272159094, 0.0], [0.1224006084, 0.0159929371, 0.0], [0.0147403684, 0.1423646057, 0.0178062967], [0.0049370966, 0.0032608585, 0.0007961032]],
]  # fmt: skip
COLOURS = {
    "haematoxylin": (0.65, 0.70, 0.29),
    "eosin": (0.07, 0.99, 0.11),
    "dab": (0.27, 0.57, 0.78),
}


def test_amounts_equal_those_of_scikit_image() -> None:
    # skimage.color.rgb2hed and separate_stains(…, hdx_from_rgb), scikit-image 0.26.
    pixels = np.array([[200, 120, 180], [90, 60, 140], [120, 80, 50], [240, 238, 241]], np.uint8)
    expected = np.array(EXPECTED)
    for values, vectors in zip(expected, (_HED, np.vstack([_HD, np.cross(*_HD)])), strict=True):
        amounts, stained = measure_pixels(pixels, stain_matrix(vectors), WHITE)
        # It divides by the logarithm of its smallest value, 1e-6, and its vectors have other lengths.
        scale = -np.log10(1e-6) * np.linalg.norm(vectors, axis=1)
        assert np.allclose(amounts, values * scale, atol=1e-6)
        assert stained.tolist() == [True, True, True, True]


def paint(densities: dict[str, np.ndarray], white: np.ndarray) -> np.ndarray:
    """Return (H, W, 3) uint8 pixels with these densities, (H, W) each, of stains."""
    total = sum(
        amount[..., None] * np.array(COLOURS[name]) / np.linalg.norm(COLOURS[name])
        for name, amount in densities.items()
    )
    return np.asarray(np.clip(white * 10.0**-total, 0, 255).round(), np.uint8)


def write_ihc(path: Path, share: float, *, white: tuple[int, int, int] = (238, 240, 236)) -> float:
    """Write a slide with blue tissue, of which a share is brown, on tinted glass; return the exact share."""
    rng = np.random.default_rng(int(share * 100))
    tissue = np.zeros((1024, 1024), bool)
    tissue[192:832, 192:832] = True
    cells = np.kron(rng.random((64, 64)) < share, np.ones((16, 16), bool)) & tissue
    noise = rng.normal(0, 0.01, tissue.shape)
    pixels = paint(
        {"haematoxylin": (0.25 + noise) * (tissue & ~cells), "dab": 0.5 * cells}, np.array(white)
    )
    tifffile.imwrite(
        path,
        pixels,
        tile=(256, 256),
        compression="jpeg",
        photometric="rgb",
        compressionargs={"level": 92},
        resolution=(1e4, 1e4),
        resolutionunit="CENTIMETER",
    )
    return float(cells.sum() / tissue.sum())


def measured(folder: Path, **options: object) -> dict[str, dict[str, str]]:
    """Measure a store, and return the rows of its table."""
    result = stains(folder, amounts=True, progress=Progress(), **options)  # type: ignore[arg-type]
    assert not result.failed
    with (folder / "stains.csv").open() as file:
        return {row.pop("slide"): row for row in csv.DictReader(file)}


@pytest.fixture
def ihc(tmp_path: Path) -> tuple[Path, dict[str, float]]:
    """Return a store of slides with planted shares of DAB, and the shares."""
    (tmp_path / "slides").mkdir()
    planted = {
        name: write_ihc(tmp_path / "slides" / f"{name}.tif", share)
        for name, share in (("none", 0.0), ("some", 0.1), ("half", 0.5), ("most", 0.9))
    }
    ingest(
        tmp_path / "slides",
        tmp_path / "a.lmdb",
        mpp=1,
        patch_size=64,
        workers=1,
        progress=Progress(),
    )
    return tmp_path / "a.lmdb", planted


@pytest.mark.usefixtures("inline_workers")
@pytest.mark.parametrize("vectors", ["ruifrok", "fitted"])
def test_planted_shares(ihc: tuple[Path, dict[str, float]], vectors: str) -> None:
    store, planted = ihc
    rows = measured(store, stain="ihc", vectors=vectors)
    for name, share in planted.items():
        if vectors == "ruifrok" or name != "none":  # nothing to be fitted
            assert abs(float(rows[name]["positive"]) - share) < 0.02, name
            assert abs(float(rows[name]["haematoxylin"]) - 0.25 * (1 - share)) < 0.02
            assert abs(float(rows[name]["dab"]) - 0.5 * share) < 0.02
        assert rows[name]["eosin"] == ""
        assert f"ihc, {vectors}, positive 0.2, white 23" in rows[name]["method"]
        assert abs(int(rows[name]["pixels"]) / 640**2 - 1) < 0.05


@pytest.mark.usefixtures("inline_workers")
def test_columns_of_patches(ihc: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    store, planted = ihc
    rows = measured(store)
    with Store(store) as opened:
        assert {
            opened.records[n].id: kind for n, kind in find_stains(opened).items()
        } == dict.fromkeys(planted, "ihc")
        for number, record in opened.complete.items():
            index = opened.index(number)
            assert "eosin" not in index or np.isnan(index["eosin"]).all()
            mean = np.average(index["positive"], weights=index["stained"])
            assert abs(mean - float(rows[record.id]["positive"])) < 1e-3
    # Another threshold measures again; the same one does not.
    assert stains(store, amounts=True, progress=Progress()).same == sorted(planted)
    strict = measured(store, positive=0.6)
    assert all(float(row["positive"]) == 0 for row in strict.values())
    export([store], tmp_path / "index.csv", progress=Progress(), index="csv")
    with (tmp_path / "index.csv").open() as file:
        cells = [row for row in csv.DictReader(file) if row["slide"] == "half"]
    assert {row["eosin"] for row in cells} == {""}
    assert abs(np.mean([float(row["dab"]) for row in cells]) - 0.25) < 0.05
    result = heatmap(store, out=tmp_path / "heat", show="dab", slide=["half"], progress=Progress())
    assert list(result.files) == ["half"]
    assert not result.failed
    result = heatmap(store, out=tmp_path / "heat", show="eosin", progress=Progress())
    assert all("has no values of eosin" in reason for reason in result.failed.values())
    assert not result.files


@pytest.mark.long(reason="ingests two real slides")
@pytest.mark.usefixtures("inline_workers")
def test_stains_of_real_slides_and_a_mixed_store(data: Path, tmp_path: Path) -> None:
    write_ihc(tmp_path / "brown.tif", 0.4)
    store = tmp_path / "a.lmdb"
    ingest(
        [*(data / "slides" / f"{name}.svs" for name in (CMU, TCGA)), tmp_path / "brown.tif"],
        store,
        level=0,
        allow_mixed_mpp=True,
        workers=1,
        progress=Progress(),
    )
    with Store(store) as opened:
        stain_of = {opened.records[n].id: kind for n, kind in find_stains(opened).items()}
        assert stain_of == {CMU: "he", TCGA: "he", "brown": "ihc"}
    ended = CliRunner().invoke(histopipe, ["stains", str(store), "--amounts"])
    assert ended.exit_code == 0
    assert "the store has H&E" in ended.output
    assert "immunohistochemistry (brown): --stain sets one for all" in ended.output
    with (store / "stains.csv").open() as file:
        rows = {row["slide"]: row for row in csv.DictReader(file)}
    assert rows[CMU]["positive"] == rows[CMU]["dab"] == rows["brown"]["eosin"] == ""
    assert 0.1 < float(rows[CMU]["eosin"]) < 1


@pytest.mark.parametrize("positive", [0.0, -0.2, float("nan"), float("inf")])
def test_a_threshold_that_is_no_density_is_refused(golden: Path, positive: float) -> None:
    with pytest.raises(UsageError, match="--positive"):
        stains(golden, amounts=True, positive=positive, progress=Progress())


def test_the_white_point_is_the_glass() -> None:
    thumbnail = np.full((200, 200, 3), (230, 235, 228), np.uint8)
    thumbnail[60:140, 60:140] = paint({"eosin": np.full((80, 80), 0.4)}, WHITE)
    assert np.abs(white_point(thumbnail) - (230, 235, 228)).max() <= 1
    assert white_point(np.full((1, 1, 3), 255, np.uint8)).tolist() == [255] * 3
