"""Training by the command line, and the properties of its results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import histopipe
from helpers.commands import RunCommand, small_disk, succeed
from helpers.lazy import tf
from helpers.runs import without_training
from helpers.stores import edited, one_slide
from helpers.trainings import (
    ARGUMENTS,
    FILES,
    assert_close,
    csv_rows,
    history,
    in_fork,
)
from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.sampling import Order
from histopipe.dataset.selection import SampleTable, select
from histopipe.errors import DamagedStore
from histopipe.runs.run import Run
from histopipe.splits.splits import load_splits
from histopipe.store.format import patch_key
from histopipe.store.store import Store
from histopipe.studies.compare import compare


def test_run_folder_contains_all_files(trained: Path) -> None:
    # Other tests write reports of the run, with its model card.
    assert {path.name for path in trained.iterdir()} - {"model-card.md"} == FILES
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["test"]["patch"]["auc"] > 0.95
    assert metrics["validation"]["patch"]["count"] == sum(metrics["patches"]["validation"].values())
    assert [row["epoch"] for row in history(trained)] == ["1"]


def test_predictions_contain_every_held_out_patch_once(trained: Path, made_store: Path) -> None:
    rows = csv_rows(trained / "predictions.csv")
    splits = json.loads((trained / "splits.json").read_text())
    side = {slide["id"]: slide["side"] for slide in splits["slides"]}
    with Store(made_store) as store:
        expected = [
            (side[record.id], record.id, record.label, str(x), str(y))
            for number, record in store.complete.items()
            if side[record.id] != "train"
            for x, y in zip(store.index(number)["x_l0"], store.index(number)["y_l0"], strict=True)
        ]
    columns = ("split", "slide", "label", "x_l0", "y_l0")
    assert sorted(tuple(row[name] for name in columns) for row in rows) == sorted(expected)
    for row in rows:
        p = {"normal": float(row["p_normal"]), "tumour": float(row["p_tumour"])}
        assert sum(p.values()) == pytest.approx(1, abs=1e-4)
        assert row["predicted"] == max(p, key=p.__getitem__)


@pytest.mark.long(reason="the training on four devices")
def test_replicas_equal_one_device(small_store: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """With dropout, augmentation, a batch size that 4 does not divide, and an incomplete last batch."""
    succeed("train", small_store, "--out", tmp_path / "many", "--devices", "cpu:4", *ARGUMENTS)
    assert_close(tmp_path / "many", uninterrupted)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["none.lmdb"], 4, "no store at none.lmdb"),
        (["--epochs", "0"], 2, "--epochs: found 0"),
        (["--devices", "tpu"], 2, "--devices: found 'tpu'"),
        (["--labels", "none.csv"], 2, "none.csv does not exist"),
        (["--splits", "none.json"], 2, "none.json does not exist"),
        (["--config", "bad.toml"], 2, "bad.toml: epochs: found 'ten', expected a whole number"),
        (["--fractions", "0.5,0.5"], 2, "--fractions"),
        (["--fractions", "0.7,nan,0.3"], 2, "--fractions"),
        (["--labels", "extra.csv"], 2, "pass --allow-extra-rows"),
        (["--resume", "--out", "out"], 2, "no run to resume in out"),
        (["--resume"], 2, "--resume needs --out"),
        (["--out", "."], 2, "exists and is not empty"),
        (["--split-by", "site"], 2, "slides without a site"),
    ],
)
def test_wrong_settings_give_one_message_and_create_no_folder(
    run: RunCommand,
    small_store: Path,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    expected: str,
) -> None:
    (tmp_path / "bad.toml").write_text('epochs = "ten"\n')
    (tmp_path / "extra.csv").write_text("slide,label\nnobody,x\n")
    store = [] if arguments[0].endswith(".lmdb") or "--resume" in arguments else [small_store]
    out = [] if {"--out", "--resume"} & set(arguments) else ["--out", "out"]
    with without_training():
        done = run("train", *store, *arguments, *out)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert not (tmp_path / "out").exists()


def test_damaged_splits_of_a_run_are_reported(
    run: RunCommand, uninterrupted: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    (copy / "splits.json").write_bytes(b"{}")
    with without_training():
        done = run("train", "--resume", "--out", copy, "--epochs", 4)
    assert done.returncode == 5, done.stderr
    assert "splits.json is damaged" in done.stderr


def test_damaged_patch_ends_training_and_is_named(
    run: RunCommand, small_store: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(small_store, tmp_path / "s.lmdb"))
    with Store(small_store) as whole:
        lost = [patch_key(n, 3) for n in whole.complete]
    edited(store, "patches", lambda txn, patches: [txn.delete(key, db=patches) for key in lost])
    done = run("train", store, "--epochs", 1, "--out", "run")
    assert done.returncode == 5, done.stderr
    assert "patch 3 is missing" in done.stderr


def test_full_disk_during_training_is_reported(
    run: RunCommand, small_store: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "60k") as disk:
        done = run("train", small_store, "--epochs", 1, "--out", disk / "run")
        assert done.returncode == 6, done.stderr
        assert "is full" in done.stderr
        assert not list((disk / "run").glob("part-*"))


def test_leaks_stop_training(run: RunCommand, small_store: Path, tmp_path: Path) -> None:
    """With `--allow-leaks`, everything that shows the test metrics names the test patients of the training."""
    with Store(small_store) as store:
        rows = [f"{r.id},{r.label},{'p' if i < 9 else i}" for i, r in enumerate(store.slides)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide,label,patient", *rows]) + "\n")
    words = ("train", small_store, "--labels", "labels.csv", "--split-by", "slide", "--epochs", 1)
    with without_training():
        refused = run(*words, "--out", "leaking")
        done = run(*words, "--out", "leaking", "--allow-leaks")
    assert refused.returncode == 2
    assert "the split leaks: found patient p on" in refused.stderr
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "leaking"
    slides = load_splits(folder / "splits.json").slides
    tested = {slide.patient for slide in slides if len(slide.on("test"))}
    leaked = tested & {slide.patient for slide in slides if not len(slide.on("test"))}
    remark = f"used in the training, too: {len(leaked)} of {len(tested)} patient{'s' * (len(tested) != 1)}"
    assert "test (held out)" not in done.stdout
    assert remark in done.stdout
    evaluation = Run(folder).result.metrics["test"]
    assert evaluation.in_training == len(leaked) > 0
    assert (
        run("report", folder, "--checklist", "claim", "--out", folder / "claim.md").returncode == 0
    )
    assert run("report", folder).returncode == 0
    assert "held-out" not in (folder / "claim.md").read_text()
    # The checklist: level of the split, test set, limitations, methods.
    for page, times in {"claim.md": 4, "report.html": 2, "model-card.md": 2}.items():
        assert (folder / page).read_text().count(remark) >= times
    # A run of an earlier version has no number: it is computed from the split.
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["test"]["in_training"]
    (folder / "metrics.json").write_text(json.dumps(metrics))
    assert Run(folder).result.metrics["test"] == evaluation
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    assert str(compare([folder, copied], resamples=0)).count(remark) == 2
    (copied / "splits.json").unlink()
    assert Run(copied).result.metrics["test"].in_training is None


@pytest.mark.nightly(reason="trains to a quality")
def test_training_on_real_tissue(run: RunCommand, data: Path, tmp_path: Path) -> None:
    """Two slides as two classes. This tests that the pipeline learns, not that the model is good."""
    (tmp_path / "mpps.csv").write_text("slide,mpp\nTCGA-CR-7395-01A-01-TS1,0.5\n")
    (tmp_path / "labels.csv").write_text(
        "slide,label\nCMU-1-Small-Region,cmu\nTCGA-CR-7395-01A-01-TS1,tcga\n"
    )
    slides = [
        data / "slides" / f"{n}.svs" for n in ("CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1")
    ]
    done = run(
        "ingest", *slides, "--mpp-csv", "mpps.csv", "--labels", "labels.csv", "--patch-size", 128
    )
    assert done.returncode == 0, done.stderr
    done = run("train", "--split-by", "patch", "--out", "run", "--epochs", 4, "--json")
    assert done.returncode == 0, done.stderr
    assert "warning: split by patch" in done.stderr
    assert json.loads(done.stdout)["validation"]["patch"]["auc"] > 0.95


def check_dataset(path: str, damaged: str) -> None:
    from histopipe.dataset.tf_data import BatchFeed

    batch = next(iter(histopipe.load_dataset(path, batch_size=3, shuffle=False)))
    assert {name: (tuple(v.shape), v.dtype.name) for name, v in batch.items()} == {
        "image": ((3, 32, 32, 3), "uint8"),
        "label": ((3,), "int32"),
        "weight": ((3,), "float32"),
        "key": ((3,), "int64"),
    }
    one_slide(Path(damaged), [b"no image"] * 9).close()
    with Store(Path(damaged)) as store:
        table = SampleTable(select([store]))
        batches = PatchBatches([store], table, batch_size=2, order=Order(9))
        feed = BatchFeed(batches)
        iterator = iter(feed.dataset(0, 5))
        for _ in range(5):
            with pytest.raises(tf.errors.OpError):
                next(iterator)
        assert type(feed.failure) is DamagedStore


def test_a_failure_of_a_reader_keeps_its_type_and_skips_no_batch(
    small_store: Path, tmp_path: Path
) -> None:
    in_fork(check_dataset, small_store, tmp_path / "s.lmdb")
