"""Test the file of a study: what `init` writes, and what commands take from it."""

from __future__ import annotations

import re
import shutil
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource

import histopipe
from helpers.click_commands import click_command
from helpers.commands import RunCommand, run_command
from helpers.paths import GOLDEN
from helpers.runs import without_training
from helpers.trainings import csv_rows
from histopipe import cli
from histopipe.cli import flags_of
from histopipe.errors import UsageError
from histopipe.studies.init_settings import INIT
from histopipe.studies.study_file import _TARGETS as TARGETS
from histopipe.system.settings import read_toml

COMMANDS = ("ingest", "train", "report", "predict", "heatmap")


def test_every_line_of_the_file_is_a_setting_of_its_command(tmp_path: Path) -> None:
    """Also the lines that are suggestions."""
    columns: dict[str, dict[str, Any]] = {
        "classification": {},
        "survival": {"time": "t", "event": "e"},  # of slide models only
        "regression": {"target": ("a", "b")},
    }
    values = product((None, "labels.csv"), (None, "uni", "encoder.onnx"), (0, 5), columns)
    for number, (labels, encoder, folds, task) in enumerate(values):
        if task == "survival" and encoder is None:
            continue
        path = tmp_path / f"{number}.toml"
        arguments = {"labels": labels, "encoder": encoder, "folds": folds, "task": task}
        written = {name: value for name, value in arguments.items() if value}
        done = histopipe.init(path, **written, **columns[task])
        embed = ["embed"] if encoder else []
        assert [*done.commands] == ["ingest", *embed, *COMMANDS[1:]]
        lines = path.read_text().replace("\n# ", "\n").splitlines()
        tables = tomllib.loads("\n".join(x for x in lines if " = " in x or x.startswith("[")))
        for name in done.commands:
            assert flags_of(click_command(name), tables, path) or name == "report"
        patch_size = tomllib.loads(path.read_text())["ingest"]["patch_size"]
        assert patch_size == (224 if encoder == "uni" else 256)
    assert set(INIT) <= {"labels", "patch_size", "mpp", "folds", "task", *TARGETS}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The folder of a study with twelve small slides, two of them new, and a file in it."""
    folder = tmp_path / "study"
    for name, numbers in (("slides", range(10)), ("new", range(10, 12))):
        (folder / name).mkdir(parents=True)
        for number in numbers:
            shutil.copy(GOLDEN / "slides" / f"slide-{number:03}.svs", folder / name)
    shutil.copy(GOLDEN / "slides" / "labels.csv", folder)
    file = folder / "histopipe.toml"
    histopipe.init(file, labels="labels.csv", patch_size=64, new_slides=["new"])
    added = {
        "seed = 1": 'epochs = 1\nmodel = "small-cnn"\nfractions = [0.5, 0.25, 0.25]',
        "patch_size = 64": "tissue = 'none'\nworkers = 1\nallow_extra_rows = true",
    }
    text = file.read_text()
    file.write_text(re.sub("|".join(added), lambda line: f"{line[0]}\n{added[line[0]]}", text))
    return folder


@pytest.mark.long(reason="each command of a study, on slides")
def test_five_commands_need_no_flags(run: RunCommand, study: Path, tmp_path: Path) -> None:
    """From another folder: paths are those of the file. A flag wins, and a training continues."""
    elsewhere, trained = tmp_path / "elsewhere", study / "runs" / "study"
    elsewhere.mkdir()
    for name in COMMANDS:
        if name == "predict":  # with a model, since no network was trained
            shutil.copy(GOLDEN / "2026-11-25" / "run" / "model.keras", trained)
        with without_training():
            done = run(name, "--config", "../study/histopipe.toml", cwd=elsewhere)
        assert done.returncode == 0, (name, done.stderr)
    assert not list(elsewhere.iterdir())
    config = read_toml(trained / "config.toml")
    settings = ("small-cnn", 1, [0.5, 0.25, 0.25])
    assert (config["model"], config["epochs"], config["fractions"]) == settings
    assert (trained / "report.html").exists()
    assert len(csv_rows(study / "predictions" / "slides.csv")) == 2
    assert list((study / "heatmaps").glob("*.png"))
    again = ("--config", study / "histopipe.toml", "--resume", "--epochs", 2)
    (trained / "metrics.json").unlink()
    with without_training():
        assert run("train", *again, cwd=tmp_path).returncode == 0
    assert len(csv_rows(trained / "history.csv")) == 2


@pytest.mark.parametrize(
    ("name", "flag", "opposite"),
    [("verify", "full", "no-full"), ("report", "no_pictures", "pictures")],
)
def test_flags_override_flags_of_the_file(
    name: str, flag: str, opposite: str, tmp_path: Path
) -> None:
    """Both ways, for a flag that the command has, and for one with no in its name."""
    (tmp_path / "study.toml").write_text(f"[{name}]\n{flag} = true\n")
    words = ["x", "--config", str(tmp_path / "study.toml")]
    for flags, is_set in (([], True), ([f"--{opposite}"], False)):
        parent = click.Context(cli.histopipe)
        context = click_command(name).make_context(name, [*words, *flags], parent=parent)
        assert context.params[flag] is is_set


def test_flags_replace_what_they_exclude(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text('[ingest]\nmpp = 0.5\n[train]\nstores = ["a.lmdb"]\nsplits = "splits.json"\n')

    def parsed(name: str, *flags: str) -> dict[str, Any]:
        words = ["--config", str(file), *flags]
        context = click_command(name).make_context(name, words, parent=click.Context(cli.histopipe))
        source = context.get_parameter_source
        written = {n for n in context.params if source(n) is not ParameterSource.DEFAULT}
        return {n: context.params[n] for n in written}

    assert parsed("ingest", "slides")["mpp"] == 0.5
    assert parsed("ingest", "slides", "--level", "0").keys() & {"mpp", "level"} == {"level"}
    assert parsed("train")["stores"] == (str(tmp_path / "a.lmdb"),)
    features = parsed("train", "--mil", "features", "--folds", "5")
    assert features.keys() & {"mil", "stores", "folds", "splits"} == {"mil", "folds"}


@pytest.mark.parametrize(
    ("name", "key", "text", "placed"),
    [
        ("embed", "model", "uni", "uni"),
        ("embed", "model", "./uni", "HERE/uni"),
        ("embed", "model", "conch-v1.5", "conch-v1.5"),
        ("embed", "model", "mine.py:network", "HERE/mine.py:network"),
        ("embed", "weights", "uni", "HERE/uni"),
        ("embed", "weights", "uni=uni", "uni=HERE/uni"),
        ("embed", "weights", "none", "none"),
        ("embed", "weights", "uni=none", "uni=none"),
        ("embed", "model", "mine.toml", "HERE/mine.toml"),
        ("predict", "encoder", "mine.onnx", "HERE/mine.onnx"),
        ("predict", "encoder_weights", "uni", "HERE/uni"),
        ("predict", "tissue", "otsu-2", "otsu-2"),
        ("init", "encoder", "mine.onnx", "HERE/mine.onnx"),
        ("repair", "tissue", "otsu", "HERE/otsu"),
        ("train", "weights", "auto", "auto"),
        ("embed", "sources", "s3://bucket/slides", "s3://bucket/slides"),
        ("ingest", "tissue", "otsu", "otsu"),
        ("ingest", "tissue", "masks", "HERE/masks"),
        ("train", "model", "resnet50", "resnet50"),
        ("train", "track", "mlflow", "mlflow"),
        ("train", "track", "mlflow:runs of all", "mlflow:HERE/runs of all"),
        ("train", "track", "mlflow:http://127.0.0.1:1", "mlflow:http://127.0.0.1:1"),
        ("train", "track", "mlflow:databricks", "mlflow:databricks"),
        ("train", "track", "mlflow:lab:5000", "mlflow:lab:5000"),
        ("ingest", "out", "~/a.lmdb", f"{Path.home()}/a.lmdb"),
        ("ingest", "slides", "$HOME/s", f"{Path.home()}/s"),
        ("ingest", "slides", "$none/s", "HERE/$none/s"),
        ("tune", "storage", "journal", "HERE/journal"),
        ("tune", "storage", "sqlite:///a.db", "sqlite:///a.db"),
    ],
)
def test_paths_are_those_of_the_file(
    name: str, key: str, text: str, placed: str, tmp_path: Path
) -> None:
    """Names stay names, even next to a folder of that name."""
    for folder in ("uni", "resnet50", "otsu"):
        (tmp_path / folder).mkdir()
    file = tmp_path / "study.toml"
    file.write_text(f"\ufeff[{name}]\r\n{key} = '{text}'\r\n")
    value = flags_of(click_command(name), read_toml(file), file)[key]
    assert (value[0] if isinstance(value, list) else value) == placed.replace("HERE", str(tmp_path))


def test_search_takes_the_settings_of_the_training(study: Path) -> None:
    shutil.copytree(GOLDEN / "2026-11-25" / "store.lmdb", study / "patches.lmdb")
    (study / "space.toml").write_text("learning_rate = [0.001, 0.01]\n")
    with (study / "histopipe.toml").open("a") as file:
        file.write('\n[tune]\nspace = "space.toml"\nout = "search"\ntrials = 1\n')
    flat = ("--space", "space.toml", "--out", "again", "--trials", 1)
    for words in (("histopipe.toml",), (study / "search" / "best.toml", *flat)):
        with without_training():
            done = run_command("tune", "--config", *words, cwd=study)
        assert done.returncode == 0, done.stderr
        best = read_toml(study / "search" / "best.toml")
        assert (best["model"], best["epochs"]) == ("small-cnn", 1)


WRONG_FILES = (
    ("[ingest]\ncolour = 5", ("unknown settings in [ingest]", "colour", "patch_size")),
    ("[ingst]\npatch_size = 5", ("unknown tables", "ingst")),
    ("patch_size = 5", ("unknown tables", "patch_size")),
    ("ingest = 5", ("expected a table [ingest]",)),
    ("[ingest]\nlabels = {a = 1}", ("[ingest] labels", "expected a text")),
    ("[ingest]\nallow_network = 1", ("expected true or false",)),
    ("[ingest]\nslides = [true]", ("[ingest] slides", "expected a text")),
    ("[ingest]\nout = ['a', 'b']", ("[ingest] out", "expected one value")),
    ("[ingest]\npatch_size = true", ("[ingest] patch_size", "found True")),
    (
        "[ingest]\npatch_size = 'x'\nslides = ['s']",
        ("--patch-size", "'x'", "(in study.toml)"),
    ),
    (
        "[ingest]\npatch_size = 1\nslides = ['s']",
        ("--patch-size: found 1", "settings of study.toml: slides, patch_size"),
    ),
    ("[ingest", ("cannot be read",)),
    ("[train]\ncolour = 1", ("unknown settings in [train]",)),
    ("colour = 1", ("unknown settings: found colour",)),
    (None, ("cannot be read",)),
)


def test_wrong_files_are_refused(run: RunCommand, tmp_path: Path) -> None:
    for text, words in WRONG_FILES:
        file = tmp_path / ("missing.toml" if text is None else "study.toml")
        _ = text and file.write_text(text)
        of_training = text is not None and text.removeprefix("[train]\n").startswith("colour")
        done = run("train" if of_training else "ingest", "--config", file.name)
        assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr
    (tmp_path / "histopipe.toml").write_text("kept")
    done = run("init")
    assert (done.returncode, "histopipe.toml exists" in done.stderr) == (2, True)
    assert (tmp_path / "histopipe.toml").read_text() == "kept"
    wrong: dict[str, dict[str, Any]] = {
        "--patch-size": {"patch_size": 1},
        "--time: found no column": {"task": "survival", "encoder": "uni"},
        "--target: found no column": {"task": "regression"},
        "--target: found --task classification": {"target": ["a"]},
        "--task survival: found no --encoder": {"task": "survival", "time": "t", "event": "e"},
        "--folds: found 1": {"folds": 1},
        "--weights: found no --encoder": {"weights": "uni/"},
    }
    for message, settings in wrong.items():
        with pytest.raises(UsageError, match=message):
            histopipe.init(tmp_path / "new.toml", **settings)
    assert not (tmp_path / "new.toml").exists()
