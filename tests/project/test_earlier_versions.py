"""Stores, runs, features and predictions of earlier versions, made by tools/make_golden_runs.py, are used as before."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import histopipe
from helpers.commands import run_command, succeed, with_tensorflow
from helpers.inline import use_inline_workers
from helpers.paths import GOLDEN
from helpers.stores import flip_bytes, read_slides
from helpers.trainings import csv_rows
from histopipe.errors import UsageError
from histopipe.splits.splitting import make_splits
from histopipe.store.store import Store

VERSIONS = ("0.2.0", "2026-11-25")
REPORTED = {"0.2.0": ("run", "predictions"), "2026-11-25": ("folds", "bags")}
INGEST = (
    "--labels",
    "labels.csv",
    "--allow-extra-rows",
    "--patch-size",
    64,
    "--quality",
    60,
    "--tissue",
    "none",
)
COMMAND_LINE = "from histopipe.cli import main; main()"


@pytest.fixture(params=VERSIONS)
def earlier(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shared_verifiers: None,
) -> Path:
    """Copy of the results of a version, with their slides, as the current folder. Slides are ingested in this process."""
    folder: Path = shutil.copytree(GOLDEN / request.param, tmp_path / request.param / "earlier")
    slides = shutil.copytree(GOLDEN / "slides", folder / "slides")
    (slides / "labels.csv").unlink()
    with Store(folder / "extended.lmdb") as store:
        for record in store.complete.values():
            os.utime(slides / f"{record.id}.svs", ns=(record.mtime_ns, record.mtime_ns))
    for settings in (folder / "search").glob("*.toml"):
        text = settings.read_text()
        root = next((word for word in text.split('"') if word.endswith("/golden/store.lmdb")), "")
        settings.write_text(text.replace(root.removesuffix("/store.lmdb"), str(folder)))
    use_inline_workers(monkeypatch)
    monkeypatch.chdir(folder)
    return folder


def patches(path: Path) -> dict[str, list[bytes | None]]:
    return {name: slide[2] for name, slide in read_slides(path).items()}


def probabilities(table: list[dict[str, str]]) -> NDArray[np.float64]:
    names = [name for name in table[0] if name.startswith("p_")]
    return np.array([[float(row[name]) for name in names] for row in table])


@pytest.mark.long(reason="ingests slides, repairs, and verifies")
def test_a_store_is_extended_and_a_damaged_slide_is_repaired_from_its_file(earlier: Path) -> None:
    """Slides are not ingested again."""
    before = patches(earlier / "extended.lmdb")
    ended = run_command("ingest", "slides", *INGEST, "--out", "extended.lmdb")
    assert ended.returncode == 0, ended.stderr
    assert "replaced" not in ended.stdout + ended.stderr
    lines = [line.split()[:2] for line in ended.stdout.splitlines()]
    assert ["ingested", "2"] in lines and ["skipped", "10"] in lines
    after = patches(earlier / "extended.lmdb")
    assert len(after) == 12 and {name: after[name] for name in before} == before
    succeed("verify", "extended.lmdb")
    before = patches(earlier / "store.lmdb")
    succeed("verify", "store.lmdb")
    flip_bytes(earlier / "store.lmdb", [(2, 5)])
    assert run_command("verify", "store.lmdb").returncode == 5
    succeed("repair", "store.lmdb", "slides")
    succeed("verify", "store.lmdb")
    assert patches(earlier / "store.lmdb") == before


def test_copies_in_an_old_and_a_new_store_are_on_one_side(earlier: Path) -> None:
    for path in (earlier / "slides").glob("*.svs"):
        path.rename(path.with_name(f"copy-of-{path.name}"))
    labels = [f"copy-of-{row['slide']},{row['label']}" for row in csv_rows(Path("labels.csv"))]
    Path("labels.csv").write_text("\n".join(["slide,label", *labels]) + "\n")
    succeed("ingest", "slides", *INGEST, "--out", "new.lmdb")
    with Store(Path("store.lmdb")) as old, Store(Path("new.lmdb")) as new:
        for seed in range(10):
            splits = make_splits([old, new], split_by="slide", seed=seed)
            sides = {slide.id: set(slide.subsets.tolist()) for slide in splits.slides}
            both = [name for name in sides if f"copy-of-{name}" in sides]
            assert len(both) == 8
            assert all(sides[name] == sides[f"copy-of-{name}"] for name in both)


@pytest.mark.long(reason="reports of runs of two versions")
def test_reports_and_comparisons(earlier: Path) -> None:
    """One version for each kind of folder, since pages take a second each."""
    for name in REPORTED[earlier.parent.name]:
        succeed("report", name, "--out", "page.html")
    for name in ("store.lmdb", "run", "bags", "folds", "search", "features", "predictions"):
        assert json.loads(succeed("info", name, "--json"))
    assert json.loads(succeed("compare", "run", "bags", "--json"))


@pytest.mark.parametrize(
    ("earlier", "run", "slides", "before"),
    [
        ("0.2.0", "run", "new", "predictions/slides.csv"),
        ("2026-11-25", "bags", "features", "bags/predictions.csv"),
    ],
    indirect=["earlier"],
)
def test_models_predict_as_before(earlier: Path, run: str, slides: str, before: str) -> None:
    """A model of patches, and one of bags."""
    (earlier / "new").mkdir()
    for name in ("slide-010.svs", "slide-011.svs"):
        (earlier / "slides" / name).rename(earlier / "new" / name)
    ended = with_tensorflow(COMMAND_LINE, "predict", run, slides, "--out", "again")
    assert ended.returncode == 0 and "next: histopipe heatmap again" in ended.stderr, ended.stderr
    old = {row["slide"]: row for row in csv_rows(earlier / before)}
    new = {row["slide"]: row for row in csv_rows(earlier / "again" / "slides.csv")}
    assert list(old) == list(new) if run == "run" else set(old) <= set(new)
    again = probabilities([new[name] for name in old])
    np.testing.assert_allclose(again, probabilities([*old.values()]), atol=1e-5)


@pytest.mark.parametrize("earlier", ["2026-11-25"], indirect=True)
def test_an_interrupted_run_continues(earlier: Path) -> None:
    succeed("train", "--resume", "--out", "interrupted")
    history = csv_rows(earlier / "interrupted" / "history.csv")
    assert [row["epoch"] for row in history] == ["1", "2", "3"]
    assert (earlier / "interrupted" / "metrics.json").exists()


@pytest.mark.parametrize("earlier", ["0.2.0"], indirect=True)
def test_interrupted_trainings_of_version_0_2_are_refused(earlier: Path) -> None:
    message = "cannot be resumed: found one of version 0.2.*continue it with histopipe 0.2"
    with pytest.raises(UsageError, match=message):
        histopipe.train(out="interrupted", resume=True)
    with pytest.raises(UsageError, match=message):
        histopipe.cross_validate(out="folds", resume=True)
    space = {"learning_rate": [0.001, 0.01], "model": "small-cnn", "epochs": 1, "batch_size": 16}
    before = [*(earlier / "search" / "trials").iterdir()]
    with pytest.raises(UsageError, match=message):
        histopipe.tune("store.lmdb", space=space, out="search", seed=3, resamples=20)
    assert [*(earlier / "search" / "trials").iterdir()] == before
