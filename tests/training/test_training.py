"""Training by the command line, and the properties of its results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import INTERRUPTIBLE, Run, small_disk, succeed, with_tensorflow
from helpers.paths import TESTS
from helpers.trainings import FILES, PREDICT, csv_rows, history, weights
from histopipe.errors import DamagedStore, UsageError
from histopipe.runs.result import read_result
from histopipe.runs.task_config import PatchTrainConfig, read_config
from histopipe.splits.splits import load_splits
from histopipe.store.store import Store
from histopipe.studies.compare import compare


@pytest.fixture(scope="module")
def trained(made_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch on patches of 128 pixels."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    succeed("train", made_store, "--model", "small-cnn", "--out", out, "--epochs", 1)
    return out


def test_run_folder_contains_all_files(trained: Path, made_store: Path) -> None:
    assert {path.name for path in trained.iterdir()} == FILES
    config = tomllib.loads((trained / "config.toml").read_text())
    assert config["stores"] == [str(made_store)]
    assert config["epochs"] == 1
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["test"]["patch"]["auc"] > 0.95
    assert metrics["validation"]["patch"]["count"] == sum(metrics["patches"]["validation"].values())
    assert [row["epoch"] for row in history(trained)] == ["1"]


def test_predictions_contain_every_held_out_patch_once(trained: Path, made_store: Path) -> None:
    rows = csv_rows(trained / "predictions.csv")
    splits = json.loads((trained / "splits.json").read_text())
    side = {slide["id"]: slide["side"] for slide in splits["slides"]}
    with Store(made_store) as store:
        expected = {
            (side[record.id], record.id, int(x), int(y))
            for number, record in store.complete.items()
            if side[record.id] != "train"
            for x, y in zip(store.index(number)["x_l0"], store.index(number)["y_l0"], strict=True)
        }
        labels = {record.id: record.label for record in store.slides}
    patches = [(row["split"], row["slide"], int(row["x_l0"]), int(row["y_l0"])) for row in rows]
    assert len(patches) == len(set(patches))
    assert set(patches) == expected
    for row in rows:
        p = {"normal": float(row["p_normal"]), "tumour": float(row["p_tumour"])}
        assert sum(p.values()) == pytest.approx(1, abs=1e-4)
        assert row["predicted"] == max(p, key=p.__getitem__)
        assert row["label"] == labels[row["slide"]]


def test_saved_model_predicts_the_same_in_plain_keras(trained: Path, made_store: Path) -> None:
    """Plain Keras, without histopipe loaded, on uint8 pixels decoded by Pillow."""
    done = subprocess.run(
        [sys.executable, "-c", PREDICT, str(trained), str(made_store)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Pillow and simplejpeg may differ by a grey level.
    assert float(done.stdout) < 0.02


@pytest.mark.parametrize("devices", ["cpu:3"])
def test_replicas_equal_one_device(
    run: Run, small_store: Path, tmp_path: Path, devices: str
) -> None:
    """With dropout, augmentation, a batch size that 3 does not divide, and an incomplete last batch."""
    arguments = [
        "--epochs",
        "2",
        "--batch-size",
        "31",
        "--split-by",
        "slide",
        "--dropout",
        "0.3",
        "--class-weights",
        "balanced",
    ]
    for out, used in (("one", "cpu"), ("many", devices)):
        done = run("train", small_store, "--out", out, "--devices", used, *arguments)
        assert done.returncode == 0, done.stderr
    one, many = history(tmp_path / "one"), history(tmp_path / "many")
    for a, b in zip(one, many, strict=True):
        for name in ("loss", "val_loss"):
            assert float(a[name]) == pytest.approx(float(b[name]), abs=1e-5)
    for w, v in zip(weights(tmp_path / "one"), weights(tmp_path / "many"), strict=True):
        assert np.linalg.norm(w - v) <= 1e-4 * max(1.0, float(np.linalg.norm(w)))


def test_config_file_repeats_a_run_and_flags_override_it(
    run: Run, small_store: Path, tmp_path: Path
) -> None:
    done = run("train", small_store, "--out", "first", "--epochs", 2, "--deterministic")
    assert done.returncode == 0, done.stderr
    done = run("train", "--config", "first/config.toml", "--out", "again", "--epochs", 1)
    assert done.returncode == 0, done.stderr
    first, again = (read_config(tmp_path / name / "config.toml") for name in ("first", "again"))
    assert again == first | {"epochs": 1}
    assert history(tmp_path / "again") == history(tmp_path / "first")[:1]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["none.lmdb"], 4, "no store at none.lmdb"),
        (["--epochs", "0"], 2, "--epochs: found 0"),
        (["--model", "nothing"], 2, "no such model"),
        (["--model", "small-cnn", "--weights", "imagenet"], 2, "has no trained weights"),
        (["--devices", "tpu"], 2, "--devices: found 'tpu'"),
        (["--devices", "gpu"], 2, "no GPU"),
        (["--labels", "none.csv"], 2, "none.csv does not exist"),
        (["--splits", "none.json"], 2, "none.json does not exist"),
        (["--config", "bad.toml"], 2, "unknown settings: found colour"),
        (
            ["--config", "typed.toml"],
            2,
            "typed.toml: epochs: found 'ten', expected a whole number",
        ),
        (["--fractions", "0.5,0.5"], 2, "--fractions"),
        (["--fractions", "0.7,nan,0.3"], 2, "--fractions"),
        (["--labels", "extra.csv"], 2, "pass --allow-extra-rows"),
        (["--resume", "--out", "out"], 2, "no run to resume in out"),
        (["--resume"], 2, "--resume needs --out"),
        (["--out", "full"], 2, "full exists and is not empty"),
        (["--split-by", "site"], 2, "slides without a site"),
    ],
)
def test_wrong_settings_give_one_message_and_create_no_folder(
    run: Run, made_store: Path, tmp_path: Path, arguments: list[str], code: int, expected: str
) -> None:
    (tmp_path / "bad.toml").write_text("colour = 3\n")
    (tmp_path / "typed.toml").write_text('epochs = "ten"\n')
    (tmp_path / "extra.csv").write_text("slide,label\nnobody,x\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    if "gpu" in arguments and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU, so the message for a missing GPU cannot be tested")
    store = [] if arguments[0].endswith(".lmdb") or "--resume" in arguments else [made_store]
    out = [] if {"--out", "--resume"} & set(arguments) else ["--out", "out"]
    done = run("train", *store, *arguments, *out)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_damaged_run_is_reported(run: Run, trained: Path, tmp_path: Path) -> None:
    for name, content in (("resume.npz", b"PK nothing"), ("splits.json", b"{}")):
        copy = tmp_path / name.replace(".", "-")
        shutil.copytree(trained, copy)
        (copy / "resume-older.npz").unlink(missing_ok=True)
        (copy / name).write_bytes(content)
        done = run("train", "--resume", "--out", copy, "--epochs", 4)
        assert done.returncode == 5, done.stderr
        assert f"{name} is damaged" in done.stderr


@pytest.mark.nightly(reason="an interrupt of a new process")
def test_interrupt_reports_how_to_resume(made_store: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [
            *INTERRUPTIBLE,
            "train",
            str(made_store),
            "--model",
            "small-cnn",
            "--out",
            "run",
            "--epochs",
            "500",
            "--patience",
            "0",
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    while not child.stderr.readline().startswith("epoch 1"):
        pass
    os.kill(child.pid, signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "continue with `histopipe train --resume --out run`" in stderr
    assert "Traceback" not in stderr
    assert (tmp_path / "run" / "resume.npz").exists()


def test_damaged_patch_ends_training_and_is_named(
    run: Run, small_store: Path, tmp_path: Path
) -> None:
    import lmdb

    from histopipe.store.format import patch_key

    for attempt in range(2):  # a hang at the end occurred in a third of the runs
        store = Path(shutil.copytree(small_store, tmp_path / f"s{attempt}.lmdb"))
        with Store(small_store) as whole:
            lost = [patch_key(n, 3) for n in whole.complete]
        with (
            lmdb.open(str(store), max_dbs=16, map_size=1 << 30) as env,
            env.begin(write=True) as txn,
        ):
            for key in lost:
                txn.delete(key, db=env.open_db(b"patches", txn=txn))
        done = run("train", store, "--epochs", 1, "--out", f"run{attempt}")
        assert done.returncode == 5
        assert "patch 3 is missing" in done.stderr
        assert "Traceback" not in done.stderr


def test_full_disk_during_training_is_reported(run: Run, made_store: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "100k") as disk:
        done = run(
            "train", made_store, "--model", "small-cnn", "--epochs", 1, "--out", disk / "run"
        )
        assert done.returncode == 6, done.stderr
        assert "is full" in done.stderr
        assert "Traceback" not in done.stderr
        assert not [path for path in (disk / "run").iterdir() if path.name.startswith("part-")]


def test_leaks_stop_training(run: Run, small_store: Path, tmp_path: Path) -> None:
    with Store(small_store) as store:
        rows = [f"{r.id},{r.label},{'p' if i < 9 else i}" for i, r in enumerate(store.slides)]
    (tmp_path / "labels.csv").write_text("\n".join(["slide,label,patient", *rows]) + "\n")
    arguments = [
        "train",
        small_store,
        "--labels",
        "labels.csv",
        "--split-by",
        "slide",
        "--epochs",
        1,
    ]
    done = run(*arguments, "--out", "leaking")
    assert done.returncode == 2
    assert "the split leaks: found patient p on" in done.stderr
    done = run(*arguments, "--out", "leaking", "--allow-leaks")
    assert done.returncode == 0, done.stderr
    assert_leak_is_shown(run, done.stdout, tmp_path / "leaking")


def assert_leak_is_shown(run: Run, printed: str, folder: Path) -> None:
    """Check that everything that shows the test metrics of a run names the test patients of the training."""
    splits = load_splits(folder / "splits.json")
    tested = {slide.patient for slide in splits.slides if len(slide.on("test"))}
    used = {slide.patient for slide in splits.slides if not len(slide.on("test"))}
    remark = f"used in the training, too: {len(tested & used)} of {len(tested)} patient{'s' * (len(tested) != 1)}"
    assert tested & used
    assert "test (held out)" not in printed
    assert remark in printed
    evaluation = read_result(folder).metrics["test"]
    assert evaluation.in_training == len(tested & used)
    assert run("report", folder, "--checklist", "claim", "--out", "claim.md").returncode == 0
    assert run("report", folder).returncode == 0
    claim = (folder.parent / "claim.md").read_text()
    assert "held-out" not in claim
    assert claim.count(remark) >= 4  # level of the split, test set, limitations, methods
    for page in ("report.html", "model-card.md"):
        assert (folder / page).read_text().count(remark) >= 2
    # A run of an earlier version has no number: it is computed from the split.
    metrics = json.loads((folder / "metrics.json").read_text())
    for side in ("validation", "test"):
        del metrics[side]["in_training"]
    (folder / "metrics.json").write_text(json.dumps(metrics))
    assert read_result(folder).metrics["test"] == evaluation
    copied = folder.parent / "copied"
    shutil.copytree(folder, copied)
    assert str(compare([folder, copied], resamples=0)).count(remark) == 2
    (copied / "splits.json").unlink()
    assert read_result(copied).metrics["test"].in_training is None


@pytest.mark.nightly(reason="trains to a quality")
def test_training_on_real_tissue(run: Run, data: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"dropout": 1.0},
        {"learning_rate": 0.0},
        {"optimizer": "magic"},
        {"fractions": (1.0, 0.0, 0.0)},
        {"split_by": "hospital"},
        {"region_um": -1.0},
    ],
)
def test_error_names_the_wrong_setting(wrong: dict[str, Any]) -> None:
    # Wrong types and choices are errors of the argument, others of the flag.
    name = next(iter(wrong))
    with pytest.raises(UsageError, match=f"^({name}|--{name.replace('_', '-')})"):
        PatchTrainConfig(**wrong)


LOADED = """
import sys
import numpy as np
import histopipe
path = sys.argv[1]
def keys(**kwargs):
    return [b["key"].numpy().tolist() for b in histopipe.load_dataset(path, batch_size=64, seed=1, **kwargs)]
whole = keys(epochs=2)
assert keys(epochs=2, start_step=5) == whole[5:]
assert len({k for step in whole[: len(whole) // 2] for k in step}) == sum(r.stored for r in histopipe.open_store(path).slides)
batch = next(iter(histopipe.load_dataset(path, batch_size=3, shuffle=False)))
print({name: (value.shape.as_list(), value.dtype.name) for name, value in batch.items()})
try:
    histopipe.load_dataset(path, batch_size=3)
except histopipe.HistopipeError as error:
    print(error)
"""


def test_load_dataset(made_store: Path) -> None:
    done = with_tensorflow(LOADED, made_store)
    assert done.returncode == 0, done.stderr
    shapes, error = done.stdout.splitlines()
    assert shapes == str(
        {
            "image": ([3, 128, 128, 3], "uint8"),
            "label": ([3], "int32"),
            "weight": ([3], "float32"),
            "key": ([3], "int64"),
        }
    )
    assert error.startswith(
        "load_dataset shuffles, but has no seed; call load_dataset(..., seed=1)"
    )


FAILING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers.stores import one_slide
from histopipe.store.store import Store
from histopipe.studies.compare import compare
from histopipe.dataset.sampling import Order
from histopipe.dataset.selection import select
from histopipe.dataset.selection import SampleTable
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.tf_data import BatchFeed
import tensorflow as tf
path = Path(sys.argv[1])
one_slide(path, [b"no image"] * 9).close()
with Store(path) as store:
    source = BatchFeed(PatchBatches([store], SampleTable(select([store])), batch_size=2, order=Order(9)))
    iterator = iter(source.dataset(0, 5))
    failed = 0
    for _ in range(5):
        try:
            next(iterator)
        except tf.errors.OpError:
            failed += 1
    print(failed, type(source.failure).__name__)
"""


def test_program_can_exit_in_the_middle_of_an_epoch(made_store: Path) -> None:
    code = (
        "import sys, histopipe\n"
        "batches = iter(histopipe.load_dataset(sys.argv[1], batch_size=16, seed=1, epochs=50))\n"
        "next(batches)\n"
        "raise SystemExit(7)\n"
    )
    for _ in range(3):
        assert with_tensorflow(code, made_store).returncode == 7


def test_reader_failure_keeps_its_type_and_skips_no_batch(tmp_path: Path) -> None:
    done = with_tensorflow(FAILING, tmp_path / "s.lmdb", TESTS)
    assert done.stdout == f"5 {DamagedStore.__name__}\n", done.stderr
