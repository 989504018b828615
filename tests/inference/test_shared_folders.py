"""Parts of a command in one folder: together, they write what one process writes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shapely
import shapely.affinity

import histopipe
from helpers.commands import Run
from helpers.results import files
from helpers.slides import make_slides
from helpers.stores import a_store, flip_a_byte, jpegs
from histopipe.errors import UsageError
from histopipe.splits.slide_table import read_slide_table
from histopipe.system.locks import locked
from histopipe.system.parts import PartOptions, Share

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


def test_plans_show_what_parts_do(
    slides: Path, small_store: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    plan = histopipe.plan_parts(small_store, part="1/2")
    assert (plan.unit, len(plan.parts)) == ("patches", 2)
    for number, (names, work) in enumerate(zip(plan.parts, plan.work, strict=True), 1):
        result = histopipe.predict(
            models["patches"], small_store, out=tmp_path / "predicted", part=f"{number}/2"
        )
        assert (len(result.done), result.patches) == (len(names), work)
    plan = histopipe.plan_parts(slides, part="2/3")
    assert plan.unit == "bytes"
    assert sum(plan.work) == sum(path.stat().st_size for path in slides.glob("*.svs"))
    for number, names in enumerate(plan.parts, 1):
        histopipe.tissue(slides, out=tmp_path / "masks", part=f"{number}/3")
        made = {path.stem.split(".")[0] for path in (tmp_path / "masks").glob("*.png")}
        done = {Path(name).stem for other in plan.parts[:number] for name in other} - {"bad"}
        assert made == done, names
    with pytest.raises(UsageError, match="--plan: found features"):
        histopipe.plan_parts(models["bags"].parent / "features")


def test_a_plan_of_embed_measures_some_batches_and_writes_nothing(
    slides: Path, small_store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "{model}"
    of_store = histopipe.plan_embed(small_store, out=out, part="1/2", **NETWORK)
    embedded = [
        histopipe.embed(small_store, out=tmp_path / "done", part=f"{number}/2", **NETWORK)
        for number in (1, 2)
    ]
    assert of_store.patches == sum(result.patches for result in embedded)
    assert of_store.work == tuple(result.patches for result in embedded)
    assert (of_store.unit, of_store.batch_size) == ("patches", 16)
    assert 0 < of_store.measured <= of_store.patches and of_store.seconds > 0
    assert of_store.feature_bytes % (2 * of_store.patches) == 0
    assert sum(of_store.shares.values()) == pytest.approx(1, abs=0.01)
    assert f"about {of_store.patches:,} patches" in str(of_store)

    tiling: dict[str, Any] = {"patch_size": 64, "mpp": 0.5, "tissue": "none"}
    (slide,) = sorted(slides.glob("*.svs"))[1:2]
    plan = histopipe.plan_embed(slide, out=out, **{**NETWORK, **tiling})
    assert (plan.unit, len(plan.parts)) == ("bytes", 1)
    assert plan.measured == 5 * 16 and plan.patches == 16**2
    both: dict[str, Any] = {"model": ("small-cnn", "efficientnet-lite0"), "batch_size": 16}
    with pytest.raises(UsageError):  # as embed refuses it
        histopipe.plan_embed(small_store, out=out, **both, weights="none")
    assert [path.name for path in tmp_path.iterdir()] == ["done"]


def test_damaged_patches_of_all_parts_are_joined(tmp_path: Path) -> None:
    values = {name: jpegs(4 * number, 4) for number, name in enumerate("abc")}
    store = a_store(tmp_path / "s.lmdb", values)
    flip_a_byte(store, 1, 2)
    whole: Any = histopipe.export(store, to="folder", out=tmp_path / "whole")
    for number in (1, 2):
        histopipe.export(store, to="folder", out=tmp_path / "parts", part=f"{number}/2")
    joined: Any = histopipe.export(store, to="folder", out=tmp_path / "parts", join=True)
    assert joined.damaged == whole.damaged
    assert len(whole.damaged) == 1
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_no_part_is_the_default_of_a_cluster(small_store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--cluster: found with --part or --join"):
        histopipe.embed(small_store, out=tmp_path, cluster="local:2", part="1/2", **NETWORK)
    options = PartOptions(cluster="local:2", part=None)
    assert options.share == Share()


def test_join_removes_no_features_of_slides_that_are_copies(slides: Path, tmp_path: Path) -> None:
    """Each machine may have a copy of the slides, with the time of the copy."""
    options: dict[str, Any] = {**NETWORK, "patch_size": 64, "mpp": 0.5}
    copies, out = tmp_path / "slides", tmp_path / "features"
    shutil.copytree(slides, copies)
    for number in (1, 2):
        histopipe.embed(copies, out=out, part=f"{number}/2", **options)
    before = {path: path.read_bytes() for path in out.glob("*.h5")}
    for path in copies.glob("*.svs"):
        os.utime(path, (1, 1))
    with pytest.raises(UsageError, match="is not done: found no part did it"):
        histopipe.embed(copies, out=out, join=True, **options)
    assert {path: path.read_bytes() for path in out.glob("*.h5")} == before
    assert len(before) == 5


def test_the_newest_part_of_a_slide_counts(slides: Path, tmp_path: Path) -> None:
    """Masks are corrected between a division into three parts and one into two."""
    for number in (1, 2, 3):
        histopipe.tissue(slides, out=tmp_path, part=f"{number}/3")
    histopipe.tissue(slides, out=tmp_path, join=True)
    before = (tmp_path / "masks.csv").read_text()
    for path in sorted(tmp_path.glob("*.geojson")):
        content = json.loads(path.read_text())
        for feature in content["features"]:
            geometry = shapely.from_geojson(json.dumps(feature["geometry"]))
            smaller = shapely.affinity.scale(geometry, 0.5, 0.5)
            feature["geometry"] = json.loads(shapely.to_geojson(smaller))
        path.write_text(json.dumps(content))
    for number in (1, 2):
        histopipe.tissue(slides, out=tmp_path, part=f"{number}/2")
    histopipe.tissue(slides, out=tmp_path, join=True)
    joined = (tmp_path / "masks.csv").read_text()
    histopipe.tissue(slides, out=tmp_path)
    assert (tmp_path / "masks.csv").read_text() == joined != before


def test_a_join_without_parts_records_nothing(small_store: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no parts to join"):
        histopipe.embed(small_store, out=tmp_path / "f", join=True, **NETWORK)
    assert not (tmp_path / "f" / "features.json").exists()
    histopipe.embed(small_store, out=tmp_path / "f", **{**NETWORK, "precision": "mixed_bfloat16"})


def test_parts_lock_files_that_network_filesystems_lock(small_store: Path, tmp_path: Path) -> None:
    histopipe.embed(small_store, out=tmp_path, part="1/2", **NETWORK)
    with locked(tmp_path / "parts" / "1-of-2" / "lock") as free:
        assert free
        with pytest.raises(UsageError, match="in use by another process"):
            histopipe.embed(small_store, out=tmp_path, part="1/2", **NETWORK)
        histopipe.embed(small_store, out=tmp_path, part="2/2", **NETWORK)
    with locked(tmp_path / "parts" / "lock", shared=True) as free:
        assert free
        monkey = pytest.MonkeyPatch()
        monkey.setattr("histopipe.system.parts._JOIN_SECONDS", 0.1)
        with pytest.raises(UsageError, match="is in use by parts"):
            histopipe.embed(small_store, out=tmp_path, join=True, **NETWORK)
        monkey.undo()
    histopipe.embed(small_store, out=tmp_path, join=True, **NETWORK)


def test_plans_of_several_slides_per_file_are_refused(small_store: Path, run: Run) -> None:
    for flags in (("--to", "webdataset"), ("--index", "csv")):
        done = run("export", small_store, *flags, "--out", "x", "--plan")
        assert done.returncode == 2 and "expected a file per slide" in done.stderr
    done = run("export", small_store, "--to", "folder", "--out", "x", "--plan", "--json")
    assert json.loads(done.stdout)["unit"] == "patches"
    done = run("predict", "RUN", small_store, "--out", "x", "--plan")
    assert done.returncode == 0 and done.stdout.startswith("part 1/1")


def test_features_have_no_parts(small_store: Path, models: dict[str, Path], tmp_path: Path) -> None:
    features = models["bags"].parent / "features"
    with pytest.raises(UsageError, match="features: found an option of several machines"):
        histopipe.predict(models["bags"], features, out=tmp_path, part="1/2")
    with pytest.raises(UsageError, match="has no parts to join"):
        histopipe.predict(models["patches"], small_store, out=tmp_path, join=True)
