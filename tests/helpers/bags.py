"""Feature files, bags with a planted signal, and a small encoder."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx
import simplejpeg
from onnx import TensorProto, helper, numpy_helper

from histopipe.features.feature_file import feature_files, read_features, read_header
from histopipe.store.store import Store

DIMENSION = 12
SIZE = 24
PREPROCESSING: dict[str, Any] = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "size": SIZE}
"""Of the encoder of `make_onnx`."""
TARGET_DIMENSION, TARGET_BAGS = 8, 60
TARGET_COLUMNS = ("slide", "patient", "time", "event", "age", "MSI", "BRAF", "share")
TARGET_TASKS: dict[str, tuple[str, ...]] = {
    "cox": ("--task", "survival", "--time", "time", "--event", "event"),
    "discrete": (
        "--task",
        "survival",
        "--time",
        "time",
        "--event",
        "event",
        "--loss",
        "discrete",
        "--batch-size",
        "4",
    ),
    "regression": ("--task", "regression", "--target", "share,age"),
    "multilabel": (
        "--task",
        "multilabel",
        "--target",
        "MSI,BRAF",
        "--class-weights",
        "balanced",
        "--batch-size",
        "1",
    ),
}


def write_bag(
    path: Path, values: np.ndarray, coords: np.ndarray | None = None, **description: Any
) -> None:
    """Write a feature file as other tools do: in chunks, without histopipe's attributes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=values, chunks=True if values.size else None)
        if coords is not None:
            file["coords"] = coords
            file["coords"].attrs["patch_size_level0"] = 512
        file.attrs.update(description)


def a_bag(number: int, rows: int, *, positive: bool) -> np.ndarray:
    """Return (rows, D) noise. In a positive bag, the first and every tenth row have an offset."""
    values = np.random.default_rng(number).normal(size=(rows, DIMENSION)).astype(np.float32)
    if positive:
        values[::10] += 3 * np.linspace(-1, 1, DIMENSION, dtype=np.float32)
    return values


def features_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: read_features(read_header(path)) for name, path in feature_files(folder).items()}


def pixels_of(store: Path) -> dict[str, np.ndarray]:
    with Store(store) as opened:
        return {
            record.id: np.stack(
                [simplejpeg.decode_jpeg(opened.value(n, row)) for row in range(record.planned)]
            )
            for n, record in opened.complete.items()
        }


def make_onnx(path: Path, *, rows: int | str = "N", output: str = "pooled") -> np.ndarray:
    """Write an ONNX file with a convolution, a ReLU and a mean. Return the (8, 3, 4, 4) weights of the convolution."""
    weights = np.random.default_rng(1).normal(size=(8, 3, 4, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["maps"], strides=[4, 4]),
        helper.make_node("Relu", ["maps"], ["bent"]),
        helper.make_node("GlobalAveragePool", ["bent"], ["pooled"]),
    ]
    shapes = {"pooled": [rows, 8, 1, 1], "maps": [rows, 8, SIZE // 4, SIZE // 4]}
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 3, SIZE, SIZE])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, shapes[output])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    path.with_suffix(".json").write_text(json.dumps(PREPROCESSING))
    return weights


def write_target_bags(folder: Path) -> None:
    """Write bags in which a share of the patches has an offset. The targets depend on this share, the age does not."""
    rng = np.random.default_rng(3)
    rows: list[tuple[object, ...]] = [TARGET_COLUMNS]
    for i in range(TARGET_BAGS):
        share, size = rng.random(), int(rng.integers(20, 40))
        values = rng.normal(size=(size, TARGET_DIMENSION)).astype(np.float32)
        values[rng.random(size) < share] += 2 * np.linspace(
            -1, 1, TARGET_DIMENSION, dtype=np.float32
        )
        write_bag(folder / f"s{i}.h5", values, np.stack([256 * np.arange(size)] * 2, axis=1))
        time, censored = rng.exponential(np.exp(-4 * (share - 0.5))), rng.exponential(1.5)
        braf = "" if rng.random() < 0.2 else int(rng.random() < 0.2 + 0.6 * share)
        rows.append(
            (
                f"s{i}",
                f"P{i}",
                round(min(time, censored), 5),
                int(time <= censored),
                round(rng.normal(60, 10), 1),
                int(share > 0.5),
                braf,
                round(share, 5),
            )
        )
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def target_training(bags: Path, task: str, *options: object) -> tuple[object, ...]:
    """Return the words of a training on the bags of `write_target_bags`."""
    return (
        "train",
        "--mil",
        bags,
        "--labels",
        bags / "labels.csv",
        *TARGET_TASKS[task],
        "--epochs",
        6,
        "--patience",
        0,
        "--resamples",
        50,
        "--learning-rate",
        3e-3,
        "--deterministic",
        *options,
    )
