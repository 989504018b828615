"""A folder for tests of the viewer: the real slide with store, run, attention, predictions, features and outlines."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helpers.commands import succeed
from helpers.scores import class_predictions
from histopipe.evaluation.label_errors import find_label_errors, write_label_errors
from histopipe.features.feature_file import writing
from histopipe.features.feature_sets import record_encoder
from histopipe.predictions.prediction_tables import (
    FOLDER,
    PREDICTIONS,
    read_predictions,
    write_predictions,
)
from histopipe.predictions.sources import PredictedSlide, PredictionsFolder
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.runs.training_data import read_labelling, split_options
from histopipe.splits.splits import SPLITS, Splits, write_splits
from histopipe.splits.splitting import make_splits
from histopipe.store.store import Store
from histopipe.system.folders import CONFIG
from histopipe.system.output import Progress
from histopipe.system.settings import to_toml
from histopipe.tasks.predictions import EvaluationSettings, Predictions
from histopipe.viewer.view import Viewer, view

SLIDE = "CMU-1-Small-Region"
CLASSES = ("Dermis", "Epidermis")
PATCH = 128


def make_viewed(folder: Path, data: Path) -> None:
    """Write the folder: slides/, patches.lmdb, outlines/, run/, bags/, predictions/ and features/."""
    (folder / "slides").mkdir()
    shutil.copy(data / "slides" / f"{SLIDE}.svs", folder / "slides")
    (folder / "outlines").mkdir()
    shutil.copy(data / "annotations" / f"{SLIDE}.geojson", folder / "outlines")
    store = folder / "patches.lmdb"
    succeed(
        "ingest",
        folder / "slides",
        "--out",
        store,
        "--patch-size",
        PATCH,
        "--annotations",
        folder / "outlines",
    )
    succeed("quality", store)
    rng = np.random.default_rng(5)
    with Store(store) as opened:
        record, index = opened.records[0], opened.index(0)
        config = PatchTrainConfig(
            stores=(str(store),), labels_from="annotation", split_by="region", region_um=300.0
        )
        splits = make_splits([opened], **split_options(config, read_labelling(config, [opened])))
    corners = index["x_l0"].astype(np.int64), index["y_l0"].astype(np.int64)
    _write_run(
        folder / "run",
        config,
        splits,
        _scores(corners, index["label"], rng),
        splits.slides[0].subsets,
    )
    _write_attention(folder / "bags", config, splits, corners, rng)
    _write_predictions(folder / "predictions", record, rng)
    (folder / "features").mkdir()
    record_encoder(folder / "features", {"encoder": "random", "dimension": 8})
    with writing(folder / "features" / f"{SLIDE}.h5", len(corners[0]), 8, "float32") as writer:
        writer.append(rng.normal(size=(len(corners[0]), 8)), np.stack(corners, axis=1))
        writer.finish({}, {"name": SLIDE})


def make_cross_validation(folder: Path, run: Path) -> None:
    """Write a cross-validation with a run as its one fold, and the labels to check of its test predictions."""
    (folder / "splits").mkdir(parents=True)
    shutil.copytree(run, folder / "fold-1")
    shutil.copy(run / CONFIG, folder)
    shutil.copy(run / SPLITS, folder / "splits" / "fold-1.json")
    scores = read_predictions(run / PREDICTIONS)["test"].labelled()
    rows = find_label_errors([scores], EvaluationSettings())
    slide = {**rows[0], "level": "slide", "x_l0": "", "y_l0": ""}
    write_label_errors(folder, [slide, *rows])


def _scores(
    corners: tuple[NDArray[np.int64], ...], label: NDArray[Any], rng: np.random.Generator
) -> Predictions:
    count = len(label)
    p = rng.random(count).astype(np.float32)
    zeros = np.zeros(count, np.int32)
    return class_predictions(
        CLASSES,
        (SLIDE,),
        (SLIDE,),
        zeros,
        zeros,
        corners[0],
        corners[1],
        label.astype(np.int32),
        np.stack([1 - p, p], axis=1),
    )


def _write_run(
    folder: Path,
    config: PatchTrainConfig,
    splits: Splits,
    scores: Predictions,
    sides: NDArray[np.int8],
) -> None:
    folder.mkdir()
    (folder / CONFIG).write_text(to_toml(config))
    write_splits(splits, folder / SPLITS)
    parts = []
    for number, side in ((1, "validation"), (2, "test")):
        rows = np.flatnonzero(sides == number)
        parts.append(({"split": side}, scores.rows(rows)))
    write_predictions(folder / PREDICTIONS, parts)


def _write_attention(
    folder: Path,
    config: PatchTrainConfig,
    splits: Splits,
    corners: tuple[NDArray[np.int64], ...],
    rng: np.random.Generator,
) -> None:
    (folder / FOLDER).mkdir(parents=True)
    (folder / CONFIG).write_text(to_toml(config))
    write_splits(splits, folder / SPLITS)
    one = np.zeros(1, np.int32)
    p = np.array([[0.3, 0.7]], np.float32)
    zero = one.astype(np.int64)
    slide = class_predictions(CLASSES, (SLIDE,), (SLIDE,), one, one, zero, zero, one, p, "slide")
    write_predictions(folder / PREDICTIONS, [({"split": "test"}, slide)])
    with (folder / FOLDER / "test.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "x_l0", "y_l0", "size_l0", "attention"])
        for x, y in zip(*(at.tolist() for at in corners), strict=True):
            writer.writerow([SLIDE, x, y, PATCH, rng.random() / 100])


def _write_predictions(folder: Path, record: Any, rng: np.random.Generator) -> None:
    """Write predictions of another grid: patches of 256 pixels without gaps."""
    predictions = PredictionsFolder(folder)
    x, y = (axis.ravel() for axis in np.meshgrid(np.arange(0, 2048, 256), np.arange(0, 2560, 256)))
    unlabelled = np.full(len(x), -1)
    scores = _scores((x.astype(np.int64), y.astype(np.int64)), unlabelled, rng)
    slide = PredictedSlide.of(record, source="x", patches=len(x))
    description = {name: getattr(slide, name) for name in slide.__dataclass_fields__}
    description |= {"size_l0": 256.0, "stride_l0": 256.0}
    folder.mkdir()
    (folder / "predict.json").write_text('{"run": "run"}')
    predictions.write(PredictedSlide(**description), scores)


class Notes(Progress):
    """Collects the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        """Keep a line."""
        self.messages.append(text)


@contextmanager
def viewing(*paths: Path, **options: Any) -> Iterator[Viewer]:
    """Run a viewer with one worker."""
    defaults = {"port": 0, "browser": False, "workers": 1, "progress": Progress()}
    with view(*paths, **{**defaults, **options}) as viewer:
        yield viewer


def fetch(
    viewer: Viewer, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """Request a path below the token; a path that begins with // is used unchanged. Return status, body and headers."""
    connection = HTTPConnection(viewer.host, viewer.port, timeout=120)
    whole = path[1:] if path.startswith("//") else f"/{viewer.token}/{path}"
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, whole, body, names)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, {name.lower(): value for name, value in answer.getheaders()}
