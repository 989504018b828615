"""Measure everything that histopipe claims about GPUs, print a table and write JSON.

    python tools/bench_gpu.py [--out gpu.json] [--folder DIR] [--minutes 4] [--only train embed ...] [--seconds S]
    python tools/bench_gpu.py --table gpu.json [...]

Stages, each in a separate process with a time limit, in order of value: training steps of ResNet50; ViT-L on patches in
memory, of a store and of slides; a training of EfficientNet-Lite0 with its reading; plain Keras `fit` with tf.data;
a lack of memory; XLA; fine-tuning of ViT-L; two logical devices. Weights and slides are synthetic, and 8 GB in --folder.
The same command continues --out: a stage in it is not repeated (--retry-failed: unless it failed). With --minutes, a
stage starts only if its limit is left, so that two calls of four minutes measure everything up to XLA.

The file has the chip and the versions ("machine"), whether it was in "miniature", the "stages" with their seconds, and
"rows": a measurement each, with its "stage", "network", and what of this it has: "precision", "xla", "batch" (patches
per step), "patches_per_s", "waiting" (share of time waiting for patches, 0 to 1), "flop_per_patch", "bytes_per_patch"
(tools/network_cost.py), "flop_share" and "bandwidth_share" (of the peaks of the chip), "micro_batch" (patches per part
of a step, after the memory was too small), "devices", "difference" (largest difference of losses), "result" or
"error". It has no path, no name of a user or a computer. `--table` prints such files as tables for the documentation.

Without a GPU, or with --miniature, everything is tiny and runs on the CPU, to test this program. Its figures mean
nothing then.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
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
sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out

import numpy as np
import tensorflow as tf
from network_cost import device_peaks, model_cost

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


FULL = Size(256, "resnet50", "uni", 64, 5.0, 12, 12_000, 4_096)
MINIATURE = Size(32, "small-cnn", str(TOOLS.parent / "tests/encoders/tiny.toml"), 4, 0.1, 6, 700, 0)


def measure_device(
    size: Size, model: str, *, xla: bool, skip_bias_gradients: bool = False, **network: Any
) -> Row:
    """Return patches per second of training steps, on one batch of patches in memory, and the cost of a patch.

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
        skip_bias_gradients=skip_bias_gradients,
        scale_loss=network.get("precision") == "mixed_float16",
    )
    try:
        rate = step_rate(TrainStep(strategy, built, optimizer, settings), size.side, size.seconds)
    except tf.errors.ResourceExhaustedError as error:
        raise MachineShort(f"a batch of {size.batch} does not fit into memory") from error
    return {"patches_per_s": rate, **model_cost(built.training, size.batch, training=True)}


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


def train(size: Size, folder: Path) -> Iterator[Row]:  # noqa: ARG001 - as all stages
    """Training steps per second of the convolutional network, on patches in memory."""
    yield from steps(size, {size.convolutional: {}}, VARIANTS[1::-1])
    options: Row = {"precision": "mixed_bfloat16", "xla": False, "skip_bias_gradients": True}
    row = {"network": size.convolutional, "batch": size.batch, **options}
    yield row | measure_device(size, size.convolutional, **options)


def tune(size: Size, folder: Path) -> Iterator[Row]:
    """Training steps per second of the Vision Transformer, on patches in memory."""
    weights = {"weights": str(folder / WEIGHTS)}
    yield from steps(
        size,
        {
            "ViT, all": weights,
            "ViT, last:2": {**weights, "trainable": "last:2"},
            "ViT, lora:8": {**weights, "trainable": "lora:8"},
        },
        VARIANTS[1:2],
    )


def steps(
    size: Size, networks: dict[str, Row], variants: tuple[tuple[Precision, bool], ...]
) -> Iterator[Row]:
    """Training steps per second of each network and variant."""
    from histopipe.errors import MachineShort

    for name, options in networks.items():
        for precision, xla in variants:
            row: Row = {"network": name, "precision": precision, "xla": xla, "batch": size.batch}
            try:
                row |= measure_device(
                    size, size.vit if options else name, xla=xla, precision=precision, **options
                )
            except MachineShort as error:
                row["error"] = str(error)
            yield row


def encode(size: Size, folder: Path, precision: Precision, *, xla: bool) -> Row:
    """Features per second of the Vision Transformer, on patches in memory, with the batch size found by trial."""
    from histopipe.inference.networks import keras_encoder

    network = keras_encoder(
        size.vit,
        weights=str(folder / WEIGHTS),
        patch_size=size.side,
        devices="auto",
        batch_size="auto",
        precision=precision,
        xla=xla,
    )
    images = np.zeros((network.batch_size, size.side, size.side, 3), np.uint8)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < size.seconds:
        network.finish(network.start(images))
        count += network.batch_size
    return {
        "network": Path(size.vit).stem,
        "precision": precision,
        "xla": xla,
        "batch": network.batch_size,
        "patches_per_s": count / (time.perf_counter() - begun),
        **model_cost(network.model, network.batch_size, training=False),
    }


def embed(size: Size, folder: Path) -> Iterator[Row]:
    """Features per second of patches in memory, of a store and of slides, and the share of time waiting."""
    memory_row = encode(size, folder, "mixed_bfloat16", xla=False)
    yield memory_row
    out = Path(tempfile.mkdtemp(dir=folder))
    tiling: Row = {"patch_size": size.side, "level": 0, "tissue": "none"}
    for source, options in ((STORE, Row()), (SLIDES, tiling)):
        result = histopipe.embed(
            folder / source,
            model=size.vit,
            weights=str(folder / WEIGHTS),
            out=out / f"features of {source}",
            precision="mixed_bfloat16",
            batch_size=memory_row["batch"],
            allow_mismatch=True,
            **options,
        )
        yield {
            **memory_row,
            "network": f"{Path(size.vit).stem}, {source}",
            "patches_per_s": result.patches / result.seconds,
            "waiting": result.input_wait / result.seconds,
        }


def train_store(size: Size, folder: Path, model: str) -> Row:
    """Train on the store for two epochs, and return the row of the second one."""
    from histopipe.runs.folder import HISTORY
    from histopipe.training.models import build_model
    from histopipe.training.objective import ClassObjective

    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    histopipe.train(
        folder / STORE,
        out=out,
        model=model,
        epochs=2,
        batch_size=size.batch,
        split_by="slide",
        precision="mixed_bfloat16",
        resamples=0,
    )
    names, *_, last = [line.split(",") for line in (out / HISTORY).read_text().splitlines()]
    row = dict(zip(names, last, strict=True))
    built = build_model(
        model,
        patch_size=size.side,
        objective=ClassObjective(2),
        dropout=0.15,
        precision="mixed_bfloat16",
    )
    return {
        "network": model,
        "precision": "mixed_bfloat16",
        "batch": size.batch,
        "patches_per_s": float(row["patches_per_s"]),
        "waiting": float(row["input_wait"]),
        **model_cost(built.training, size.batch, training=True),
    }


def reading(size: Size, folder: Path) -> Iterator[Row]:
    """A training of a small network from a store: reading has to keep up."""
    yield train_store(size, folder, "efficientnet-lite0" if size is FULL else size.convolutional)


def fit(size: Size, folder: Path) -> Iterator[Row]:
    """A training from a store, and plain Keras `fit` with tf.data on the same JPEG patches, both without XLA."""
    import keras

    from histopipe.store.store import Store

    yield train_store(size, folder, size.convolutional)
    with Store(folder / STORE) as store:
        places = [
            (slide, row) for slide in store.records for row in range(len(store.index(slide)["crc"]))
        ]
        values = [store.value(*place) for place in places]
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = (
        keras.applications.ResNet50(weights=None, classes=2, input_shape=(size.side, size.side, 3))
        if size is FULL
        else keras.Sequential(
            [keras.Input((size.side, size.side, 3)), keras.layers.Flatten(), keras.layers.Dense(2)]
        )
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)

    def decode(value: tf.Tensor, slide: tf.Tensor) -> Any:
        image = tf.ensure_shape(tf.io.decode_jpeg(value), (size.side, size.side, 3))
        return tf.cast(tf.image.random_flip_left_right(image), tf.float32) / 255, slide % 2

    dataset = (
        tf.data.Dataset.from_tensor_slices((values, [slide for slide, _ in places]))
        .shuffle(len(places))
        .map(decode, tf.data.AUTOTUNE)
        .batch(size.batch, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )
    model.fit(dataset, verbose=0)  # compiles
    begun = time.perf_counter()
    model.fit(dataset, verbose=0)
    rate = len(places) // size.batch * size.batch / (time.perf_counter() - begun)
    row = {
        "network": f"{model.name}, Keras fit",
        "precision": "mixed_bfloat16",
        "batch": size.batch,
    }
    yield {**row, "patches_per_s": rate, **model_cost(model, size.batch, training=True)}


def memory(size: Size, folder: Path) -> Iterator[Row]:
    """A training with a batch that does not fit into memory."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    histopipe.train(
        folder / STORE,
        out=out,
        model=size.convolutional,
        epochs=1,
        batch_size=size.large_batch or size.batch,
        accumulate=1 if size.large_batch else 2,  # as if memory had run out
        split_by="slide",
        resamples=0,
    )
    description = json.loads((out / "metrics.json").read_text())
    yield {
        "network": size.convolutional,
        "batch": size.large_batch or size.batch,
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
    divide(kind, 16_384 if size.large_batch else None)
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


def xla(size: Size, folder: Path) -> Iterator[Row]:
    """Features and training steps, compiled by XLA."""
    yield encode(size, folder, "mixed_bfloat16", xla=True)
    yield from steps(size, {size.convolutional: {}}, VARIANTS[2:])


def data(size: Size, folder: Path) -> Iterator[Row]:
    """Write weights, slides and a store."""
    prepare(size, folder, store=True)
    yield {"result": "written"}


STAGES: dict[str, tuple[Callable[[Size, Path], Iterator[Row]], int]] = {
    "train": (train, 50),
    "data": (data, 70),
    "embed": (embed, 100),
    "reading": (reading, 50),
    "fit": (fit, 50),
    "memory": (memory, 50),
    "xla": (xla, 90),
    "tune": (tune, 90),
    "logical": (logical, 60),
}
"""Function and limit in seconds of each stage. The first three are a call of four minutes, those up to XLA the next."""


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


def run_stage(name: str, folder: Path, options: list[str]) -> list[Row]:
    """Run a stage in a process, and return its rows, the last of which has the error, if any.

    At its limit the process and those that it started are killed. They write to files: none can keep a pipe open.
    """
    rows_file, log = folder / f"{name}.rows", folder / f"{name}.log"
    command = [sys.executable, __file__, "--folder", str(folder), "--stage", name, *options]
    limit, error = STAGES[name][1] * (3 if "--miniature" in options else 1), ""
    with rows_file.open("w") as rows, log.open("w") as errors:
        process = subprocess.Popen(command, stdout=rows, stderr=errors, process_group=0)
        try:
            if process.wait(limit):
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                error = last[0] if last else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"took longer than {limit} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in rows_file.read_text().splitlines() if line.startswith("{")]
    measured = [{"stage": name, **json.loads(line)} for line in lines if line.endswith("}")]
    return [*measured, {"stage": name, "error": error}] if error else measured


def add_shares(row: Row, peaks: tuple[float, float, float, str]) -> Row:
    """Return a row with its shares of the peaks of operations and of bandwidth."""
    if "flop_per_patch" not in row or "patches_per_s" not in row:
        return row
    peak, rate = peaks[row.get("precision") == "float32"], row["patches_per_s"]
    return row | {
        "flop_share": rate * row["flop_per_patch"] / peak,
        "bandwidth_share": rate * row["bytes_per_patch"] / peaks[2],
    }


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
    return "  ".join(f"{name} {_cell(name, value) or '-'}" for name, value in row.items())


COLUMNS = {
    "stage": "measurement",
    "network": "network",
    "precision": "precision",
    "xla": "XLA",
    "batch": "patches per step",
    "patches_per_s": "patches/s",
    "waiting": "waiting",
    "flop_per_patch": "FLOP per patch",
    "bytes_per_patch": "bytes per patch",
    "flop_share": "of peak FLOP/s",
    "bandwidth_share": "of peak bytes/s",
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
    if name == "waiting" or name.endswith("_share"):
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
    parser.add_argument("--minutes", type=float, default=60.0, help="of this call  [default: 60]")
    parser.add_argument("--miniature", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--retry-failed", action="store_true")
    parser.add_argument("--seconds", type=float, help="per measurement  [default: 5]")
    parser.add_argument("--table", nargs="+", type=Path, help="print these files as tables")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print("\n".join(map(table, options.table)))
        return
    if options.miniature:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # before TensorFlow uses a device
    size = FULL if tf.config.list_physical_devices("GPU") else MINIATURE
    if options.seconds and size is FULL:
        size = replace(size, seconds=options.seconds)
    if options.stage:
        for row in STAGES[options.stage][0](size, options.folder):
            print(json.dumps(row), flush=True)
        return
    measure_all(options, size)


def measure_all(options: argparse.Namespace, size: Size) -> None:
    """Run the stages that the file lacks, and write it after each: none that follows can lose it."""
    ends, about = time.monotonic() + 60 * options.minutes, machine()
    result: Row = {"machine": about, "miniature": size is MINIATURE, "stages": {}, "rows": []}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    if size is MINIATURE:
        print("no GPU: running in miniature to test this program; the figures mean nothing")
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if "peaks" not in result:
        result["peaks"] = device_peaks(next(iter(about["gpus"]), None))
    passed = ["--miniature"] if options.miniature else []
    passed += ["--seconds", str(size.seconds)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            failed = any(row["stage"] == name and "error" in row for row in result["rows"])
            written = name != "data" or (folder / STORE).exists()
            if name in result["stages"] and written and not (failed and options.retry_failed):
                continue
            if ends - time.monotonic() < STAGES[name][1]:
                print(f"{name}: needs {STAGES[name][1]} s: call again")
                break
            begun = time.monotonic()
            rows = [add_shares(row, result["peaks"]) for row in run_stage(name, folder, passed)]
            result["rows"] = [row for row in result["rows"] if row["stage"] != name] + rows
            result["stages"][name] = round(time.monotonic() - begun, 1)
            for row in rows:
                print(line(row), flush=True)
            temporary_out = options.out.with_suffix(".tmp")
            temporary_out.write_text(json.dumps(result, indent=1) + "\n")
            temporary_out.replace(options.out)


if __name__ == "__main__":
    main()
