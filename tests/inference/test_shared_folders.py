"""Parts of a command in one folder: together, they write what one process writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import histopipe
from helpers.results import files
from helpers.slides import make_slides
from histopipe.errors import UsageError
from histopipe.splits.slide_table import read_slide_table

NETWORK: dict[str, Any] = {"model": "small-cnn", "batch_size": 16}
TABLES = {"features.json", "predict.json", "slides.csv", "masks.csv", "export.json", "index.html"}
Compute = Callable[..., Any]


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slides")
    make_slides(folder, "--count", "5", "--size", "1024x1024")
    (folder / "bad.svs").write_bytes(b"no slide")
    return folder


@pytest.fixture(scope="module")
def with_masks(slides: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store") / "patches.lmdb"
    histopipe.ingest(slides, store, patch_size=64, mpp=0.5)
    return store


@pytest.fixture(scope="module")
def models(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    histopipe.embed(small_store, out=folder / "features", **NETWORK)
    common: dict[str, Any] = {"epochs": 1, "seed": 1}
    histopipe.train(small_store, out=folder / "patches", **common)
    histopipe.train(out=folder / "bags", mil=folder / "features", **common)
    return {name: folder / name for name in ("patches", "bags")}


COMMANDS = ("stores", "slides", "patches", "bags", "bags of slides", "tissue")
EXPORTS = ("tfrecord", "webdataset", "folder", "masks")


@pytest.fixture(params=[*COMMANDS, *EXPORTS])
def compute(
    request: pytest.FixtureRequest,
    slides: Path,
    with_masks: Path,
    small_store: Path,
    models: dict[str, Path],
) -> Compute:
    if request.param == "stores":
        return lambda **options: histopipe.embed(small_store, **NETWORK, **options)
    if request.param == "slides":
        tiling: dict[str, Any] = {"patch_size": 64, "mpp": 0.5}
        return lambda **options: histopipe.embed(slides, **NETWORK, **tiling, **options)
    if request.param == "tissue":
        return lambda **options: histopipe.tissue(slides, **options)
    if request.param in EXPORTS:
        to = {"to": request.param, "shard_patches": 20}
        return lambda **options: histopipe.export(with_masks, **to, **options)
    model, _, of_slides = request.param.partition(" of ")
    return lambda **options: histopipe.predict(
        models[model], slides if of_slides else small_store, **options
    )


def test_parts_write_what_one_process_writes(compute: Compute, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole" / "out", tmp_path / "divided" / "out"
    expected = compute(out=whole)
    results = [compute(out=parts, part=f"{number}/3") for number in (3, 1, 2)]
    assert not TABLES & {path.name for path in parts.iterdir()}
    for _ in range(2):  # twice is harmless
        joined = compute(out=parts, join=True)
        assert files(parts) == files(whole)
        assert joined.failed == expected.failed
    if not hasattr(expected, "slides"):  # the masks are written again
        assert sum(result.patches for result in results) == expected.patches > 0
        assert compute(out=parts, part="2/3").patches == 0
    assert compute(out=parts, part="3/3").failed == results[0].failed
    assert compute(out=parts, join=True) and files(parts) == files(whole)


def test_slides_that_are_not_done_are_named(compute: Compute, tmp_path: Path) -> None:
    compute(out=tmp_path, part="1/2")
    with pytest.raises(UsageError, match=r"is not done: found no part did it, expected with --jo"):
        compute(out=tmp_path, join=True)
    for journal in tmp_path.rglob("parts/1-of-2/journal"):
        journal.unlink()  # as of a part that was killed
    with pytest.raises(UsageError, match=r"parts that have not ended: 1-of-2"):
        compute(out=tmp_path, join=True)
    compute(out=tmp_path, part="1/2")
    compute(out=tmp_path, part="2/2")
    compute(out=tmp_path, join=True)


def test_parts_with_other_settings_are_refused(slides: Path, tmp_path: Path) -> None:
    def embed(**options: Any) -> None:
        histopipe.embed(
            slides, out=tmp_path, **{"patch_size": 64, "mpp": 0.5, **NETWORK, **options}
        )

    embed(part="1/2")
    with pytest.raises(UsageError, match="other settings: found tiling"):
        embed(part="2/2", mpp=1.0)
    embed(part="2/2")
    embed(join=True)
    reasons = {slide.slide: slide.reason for slide in read_slide_table(tmp_path / "slides.csv")}
    assert len(reasons) == 6 and reasons["bad"] is not None


def test_features_have_no_parts(small_store: Path, models: dict[str, Path], tmp_path: Path) -> None:
    features = models["bags"].parent / "features"
    with pytest.raises(UsageError, match="features: found an option of several machines"):
        histopipe.predict(models["bags"], features, out=tmp_path, part="1/2")
    with pytest.raises(UsageError, match="has no parts to join"):
        histopipe.predict(models["patches"], small_store, out=tmp_path, join=True)
