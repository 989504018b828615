"""Measure everything that histopipe claims about GPUs, print a table and write JSON.

    python tools/bench_gpu.py [--out gpu.json] [--folder DIR] [--only train embed ...] [--seconds S]
    python tools/bench_gpu.py --table gpu.json [...]

Stages, each in a separate process: training steps and embedding of ResNet50 and ViT-L (random weights) in float32,
bfloat16 and with XLA; the share of time that a training waits for input; the loop against Keras' `fit`; recovery from a
real lack of memory; two logical devices on one GPU. Takes 15 minutes on a fast GPU, and 8 GB in --folder, where a
later run finds the weights and the slides again, and a log of each stage is.

The file has the chip and the versions ("machine"), whether it was in "miniature", and "rows": a measurement each, with
its "stage", "network", and what of this it has: "precision", "xla", "batch" (patches per step), "patches_per_s" (median
or mean over the stage's seconds), "waiting" (share of time waiting for patches, 0 to 1), "micro_batch" (patches per
part of a step, after the memory was too small), "devices", "difference" (largest difference of losses), "result" or
"error". It has no path, no name of a user or a computer. `--table` prints such files as tables for the documentation.

Without a GPU everything runs in miniature, in one process, to test this program. Its figures mean nothing then.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import histopipe
from histopipe.runs.config import Precision

TOOLS = Path(__file__).parent
WEIGHTS, STORE, SLIDES = "vit.safetensors", "patches.lmdb", "slides"
VARIANTS: tuple[tuple[Precision, bool], ...] = (
    ("float32", False),
    ("mixed_bfloat16", False),
    ("mixed_bfloat16", True),
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        side: of the patches in pixels.
        convolutional: name of the convolutional network.
        vit: name or path of the preset of the Vision Transformer.
        batch: patches per training step.
        seconds: per measurement.
        slides, slide_side: synthetic slides for the stages that need a store, and their side in pixels.
        large_batch: patches of a step that does not fit into the GPU's memory; 0: skip that stage.
    """

    side: int
    convolutional: str
    vit: str
    batch: int
    seconds: float
    slides: int
    slide_side: int
    large_batch: int


FULL = Size(256, "resnet50", "uni", 64, 10.0, 12, 12_000, 16_384)
MINIATURE = Size(32, "small-cnn", str(TOOLS.parent / "tests/encoders/tiny.toml"), 4, 0.1, 6, 700, 0)


def measure_device(size: Size, model: str, *, xla: bool, **network: Any) -> float:
    """Return patches per second of training steps, on one batch of patches in memory.

    `network` has more arguments of `build_model`.

    Raises:
        MachineShort: the batch does not fit into memory.
    """
    import keras

    from histopipe.errors import MachineShort
    from histopipe.training.devices import make_strategy
    from histopipe.training.models import build_model
    from histopipe.training.objective import ClassObjective
    from histopipe.training.train_step import StepSettings, TrainStep

    strategy = make_strategy("auto")
    with strategy.scope():
        objective = ClassObjective(2)
        built = build_model(
            model, patch_size=size.side, objective=objective, dropout=0.15, **network
        )
        optimizer = keras.optimizers.Adam()
    settings = StepSettings(
        batch_size=size.batch,
        objective=objective,
        class_weight=np.ones(objective.outputs, np.float32),
        xla=xla,
        scale_loss=network.get("precision") == "mixed_float16",
    )
    try:
        return step_rate(TrainStep(strategy, built, optimizer, settings), size.side, size.seconds)
    except tf.errors.ResourceExhaustedError as error:
        raise MachineShort(f"a batch of {size.batch} does not fit into memory") from error


def step_rate(train_step: Any, side: int, seconds: float) -> float:
    """Return patches per second of a `TrainStep`, on a batch of black patches of `side` pixels."""
    from histopipe.dataset.sampling import replica_rows
    from histopipe.training.devices import one_per_replica

    size, replicas = train_step.settings.batch_size, train_step.strategy.num_replicas_in_sync
    rows = [len(replica_rows(size, replicas, replica)) for replica in range(replicas)]
    parts = [
        {
            "image": tf.zeros((count, side, side, 3), tf.uint8),
            "label": tf.zeros((count,), tf.int32),
            "weight": tf.ones((count,)),
            "key": tf.range(count, dtype=tf.int64),
        }
        for count in rows
    ]
    batch, number = one_per_replica(train_step.strategy, parts, 0), tf.constant(0, tf.int64)

    def step() -> None:
        gradients, values = train_step.gradients(batch, number, max(rows), max(rows))
        train_step.apply(gradients, tf.zeros(2))
        # Fetching a result waits for it: devices compute asynchronously.
        np.asarray(values[0][0])

    step()  # compiles it
    steps, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        step()
        steps += 1
    return float(steps * size / (time.perf_counter() - begun))


def train(size: Size, folder: Path) -> Iterator[Row]:
    """Training steps per second, on patches in memory."""
    from histopipe.errors import MachineShort

    networks: dict[str, dict[str, Any]] = {
        size.convolutional: {},
        "ViT, all": {"weights": str(folder / WEIGHTS)},
        "ViT, last:2": {"weights": str(folder / WEIGHTS), "trainable": "last:2"},
        "ViT, lora:8": {"weights": str(folder / WEIGHTS), "trainable": "lora:8"},
    }
    for name, options in list(networks.items())[: None if size.large_batch else 2]:
        model = size.vit if options else name
        for precision, xla in VARIANTS[:: 1 if size.large_batch else 2]:
            try:
                rate = measure_device(size, model, xla=xla, precision=precision, **options)
            except MachineShort as error:
                yield {"network": name, "precision": precision, "xla": xla, "error": str(error)}
                continue
            yield {
                "network": name,
                "precision": precision,
                "xla": xla,
                "batch": size.batch,
                "patches_per_s": rate,
            }


def embed(size: Size, folder: Path) -> Iterator[Row]:
    """Features per second, on patches in memory, with the batch size found by trial."""
    from histopipe.inference.networks import keras_encoder

    networks = {size.convolutional: "none", size.vit: str(folder / WEIGHTS)}
    networks.pop("small-cnn", None)  # only for training
    for model, weights in networks.items():
        for precision, xla in VARIANTS[:: 1 if size.large_batch else 2]:
            network = keras_encoder(
                model,
                weights=weights,
                patch_size=size.side,
                devices="auto",
                batch_size="auto",
                precision=precision,
                xla=xla,
            )
            images = np.zeros((network.batch_size, size.side, size.side, 3), np.uint8)
            begun, steps = time.perf_counter(), 0
            while time.perf_counter() - begun < size.seconds:
                network.finish(network.start(images))
                steps += 1
            rate = steps * network.batch_size / (time.perf_counter() - begun)
            yield {
                "network": Path(model).stem,
                "precision": precision,
                "xla": xla,
                "batch": network.batch_size,
                "patches_per_s": rate,
            }


def input_wait(size: Size, folder: Path) -> Iterator[Row]:
    """A training and an embedding from a store: share of time waiting for patches."""
    from histopipe.runs.folder import HISTORY

    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    histopipe.train(
        folder / STORE,
        out=out,
        model=size.convolutional,
        epochs=2,
        batch_size=size.batch,
        split_by="slide",
        precision="mixed_bfloat16",
        resamples=0,
    )
    names, *_, last = [line.split(",") for line in (out / HISTORY).read_text().splitlines()]
    row = dict(zip(names, last, strict=True))
    yield {
        "network": f"train {size.convolutional}",
        "patches_per_s": float(row["patches_per_s"]),
        "waiting": float(row["input_wait"]),
    }
    tiling: Row = {"patch_size": size.side, "level": 0, "tissue": "none"}
    for source, options in ((STORE, Row()), (SLIDES, tiling)):
        result = histopipe.embed(
            folder / source,
            model=size.vit,
            weights=str(folder / WEIGHTS),
            out=out.with_name(f"features of {source}"),
            precision="mixed_bfloat16",
            batch_size="auto",
            allow_mismatch=True,
            **options,
        )
        yield {
            "network": f"embed {Path(size.vit).stem}, {source}",
            "patches_per_s": result.patches / result.seconds,
            "waiting": result.input_wait / result.seconds,
        }


def fit(size: Size, folder: Path) -> Iterator[Row]:
    """The training loop against Keras' `fit`, see tools/bench_train.py."""
    done = subprocess.run(
        [
            sys.executable,
            str(TOOLS / "bench_train.py"),
            str(folder / STORE),
            "--model",
            size.convolutional,
            "--batch-size",
            str(size.batch),
            "--rounds",
            "5" if size.large_batch else "1",
            "--steps",
            "40" if size.large_batch else "2",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    yield {"network": size.convolutional, "result": done.stdout.splitlines()[-1]}


def memory(size: Size, folder: Path) -> Iterator[Row]:
    """A training with a batch that does not fit into memory."""
    if not size.large_batch:
        yield {
            "network": size.convolutional,
            "error": "needs a GPU: a CPU's process would be killed",
        }
        return
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    histopipe.train(
        folder / STORE,
        out=out,
        model=size.convolutional,
        epochs=1,
        batch_size=size.large_batch,
        split_by="slide",
        resamples=0,
    )
    description = json.loads((out / "metrics.json").read_text())
    yield {
        "network": size.convolutional,
        "batch": size.large_batch,
        "micro_batch": description["micro_batch"],
    }


def logical(size: Size, folder: Path) -> Iterator[Row]:
    """Largest difference of losses between one device and two logical devices on it."""
    import keras

    from histopipe.training.devices import one_per_replica
    from histopipe.training.models import build_model
    from histopipe.training.objective import ClassObjective
    from histopipe.training.train_step import StepSettings, TrainStep

    kind = "GPU" if size.large_batch else "CPU"
    if size.large_batch:
        divide("GPU", 16_384)
    names = [
        device.name.removeprefix("/device:") for device in tf.config.list_logical_devices(kind)
    ]
    draw = np.random.default_rng(1)
    images = draw.integers(0, 256, (8, size.side, size.side, 3), np.uint8)
    losses = []
    for devices in (names[:1], names):
        strategy = (
            tf.distribute.MirroredStrategy(devices, tf.distribute.HierarchicalCopyAllReduce())
            if len(devices) > 1
            else tf.distribute.OneDeviceStrategy(devices[0])
        )
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = build_model(
                size.vit,
                patch_size=size.side,
                objective=ClassObjective(2),
                dropout=0.1,
                weights=str(folder / WEIGHTS),
            )
            optimizer = keras.optimizers.Adam(1e-5)
        settings = StepSettings(
            batch_size=8, objective=ClassObjective(2), class_weight=np.ones(2, np.float32)
        )
        step, count, step_losses = (
            TrainStep(strategy, model, optimizer, settings),
            8 // len(devices),
            [],
        )
        shares = [
            {
                "image": tf.constant(images[first : first + count]),
                "label": tf.constant(np.arange(first, first + count) % 2, tf.int32),
                "weight": tf.ones((count,)),
                "key": tf.range(first, first + count, dtype=tf.int64),
            }
            for first in range(0, 8, count)
        ]
        batch = one_per_replica(strategy, shares, 0)
        for _ in range(5):
            gradients, values = step.gradients(batch, tf.constant(0, tf.int64), count, count)
            step.apply(gradients, tf.zeros(2))
            step_losses.append(np.mean([np.asarray(part)[:, -2].mean() for part in values[0]]))
        losses.append(np.array(step_losses))
    yield {
        "network": "ViT",
        "devices": len(names),
        "difference": float(np.abs(losses[1] - losses[0]).max()),
    }


def divide(kind: str, memory_mb: int | None) -> None:
    """Divide the first device into two logical devices. TensorFlow must not have used it."""
    device = tf.config.list_physical_devices(kind)[0]
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=memory_mb)] * 2
    tf.config.set_logical_device_configuration(device, parts)


STAGES: dict[str, Callable[[Size, Path], Iterator[Row]]] = {
    "train": train,
    "embed": embed,
    "input_wait": input_wait,
    "fit": fit,
    "memory": memory,
    "logical": logical,
}


def prepare(size: Size, folder: Path, *, store: bool) -> None:
    """Write what the folder lacks: random weights of the Vision Transformer, a `store` of synthetic slides."""
    from safetensors.numpy import save_file

    from histopipe.pretrained.architecture import NAMINGS, expected_shapes
    from histopipe.pretrained.presets import load_preset

    preset, draw = load_preset(size.vit), np.random.default_rng(1)
    assert preset.architecture is not None  # noqa: S101
    if not (folder / WEIGHTS).exists():
        shapes = expected_shapes(
            preset.architecture, NAMINGS[preset.naming], preset.preprocessing.trained
        )
        save_file(
            {
                name: 0.02 * draw.standard_normal(shape, np.float32)
                for name, shape in shapes.items()
            },
            folder / WEIGHTS,
        )
    if not store or (folder / STORE).exists():
        return
    side = f"{size.slide_side}x{size.slide_side}"
    subprocess.run(
        [
            sys.executable,
            str(TOOLS / "make_slides.py"),
            str(folder / SLIDES),
            "--count",
            str(size.slides),
            "--size",
            side,
            "--classes",
            "normal,tumour",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    histopipe.ingest(
        folder / SLIDES,
        folder / STORE,
        labels=folder / SLIDES / "labels.csv",
        patch_size=size.side,
        tissue="none",
    )


def measure(names: list[str], size: Size, folder: Path) -> Iterator[Row]:
    """Run stages: on a GPU each in a separate process, which prints one JSON row per line."""
    for name in names:
        if not size.large_batch:
            yield from ({"stage": name, **row} for row in STAGES[name](size, folder))
            continue
        command = [sys.executable, __file__, "--folder", str(folder), "--stage", name]
        command += ["--seconds", str(size.seconds)]
        log = folder / f"{name}.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            for printed in process.stdout or ():
                if printed.startswith("{"):
                    yield {"stage": name, **json.loads(printed)}
        if process.returncode:
            reason = log.read_text().strip().splitlines()[-1:] or [
                f"exit code {process.returncode}"
            ]
            yield {"stage": name, "error": reason[0]}


def machine() -> Row:
    """Return the chip and the versions."""
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    libraries = ("tensorflow", "tensorflow-cpu", "keras")
    versions = {"histopipe": histopipe.__version__}
    for name in libraries:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    build = tf.sysconfig.get_build_info()
    return {
        "gpus": [gpu.get("device_name", "unknown") for gpu in details],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
    }


def line(row: Row) -> str:
    """Return a row of the table."""
    values = [f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row.values()]
    return "  ".join(f"{value:<14}" for value in values).rstrip()


COLUMNS = {
    "stage": "measurement",
    "network": "network",
    "precision": "precision",
    "xla": "XLA",
    "batch": "patches per step",
    "patches_per_s": "patches/s",
    "waiting": "waiting",
}
"""Columns of a table; every other value of a row is in the last column, by its name."""


def table(file: Path) -> str:
    """Return the measurements of a file as a Markdown table, under the chip and the versions."""
    content = json.loads(file.read_text())
    if content["miniature"]:
        raise SystemExit(
            f"{file}: measured without a GPU, in miniature; expected a file from a GPU"
        )
    about = content["machine"]
    versions = [f"{name} {value}" for name, value in about.items() if name not in ("gpus", "cores")]
    lines = [
        f"{', '.join(about['gpus'])}, {about['cores']} cores; {', '.join(versions)}",
        "",
        f"| {' | '.join(COLUMNS.values())} | |",
        "| --- " * (len(COLUMNS) + 1) + "|",
    ]
    for row in content["rows"]:
        cells = [_cell(name, row.get(name)) for name in COLUMNS]
        rest = [f"{name} {_cell(name, row[name])}" for name in row if name not in COLUMNS]
        lines.append(f"| {' | '.join(cells)} | {', '.join(rest)} |")
    return "\n".join(lines) + "\n"


def _cell(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    if name == "waiting":
        return f"{value:.0%}"
    if name == "patches_per_s":
        return f"{value:,.0f}"
    return "yes" if value is True else f"{value:.3g}" if isinstance(value, float) else f"{value}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument(
        "--folder", type=Path, help="for weights, slides and runs  [default: a temporary folder]"
    )
    parser.add_argument("--only", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seconds", type=float, help="per measurement  [default: 10]")
    parser.add_argument("--table", nargs="+", type=Path, help="print these files as tables")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print("\n".join(map(table, options.table)))
        return
    size = FULL if tf.config.list_physical_devices("GPU") else MINIATURE
    if options.seconds and size is FULL:
        size = replace(size, seconds=options.seconds)
    if options.stage:
        for row in STAGES[options.stage](size, options.folder):
            print(json.dumps(row), flush=True)
        return
    about = machine()
    if size is MINIATURE:
        divide("CPU", None)
        print("no GPU: running in miniature to test this program; the figures mean nothing")
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(size, folder, store=bool({"input_wait", "fit", "memory"} & {*options.only}))
        rows = []
        for row in measure(options.only, size, folder):
            rows.append(row)
            print(line(row), flush=True)
            # After each: what was measured is not lost when a later stage is ended.
            result = {"machine": about, "miniature": size is MINIATURE, "rows": rows}
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
