"""Export the model of a run as one file with a description, for programs without histopipe."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import HistopipeError, MachineShort, UsageError
from histopipe.inference.finished_runs import FinishedRun, read_run
from histopipe.runs import folder as run_folder
from histopipe.runs.task_config import BagTrainConfig
from histopipe.system.files import atomic_write, file_sha256, writable, write_json
from histopipe.system.filesystems import roomy
from histopipe.system.output import Result
from histopipe.system.tensorflow import load_quietly

if TYPE_CHECKING:
    import keras

ModelFormat = Literal["onnx", "keras"]
OPSET = 15
"""Version of the ONNX operators: OpenCV and onnxruntime read it."""
CHANNELS_FIRST = "channels-first"
"""Part of the name of the file whose input is (N, 3, H, W) float32, as QuPath and OpenCV make it."""
_TOLERANCE = 1e-4
"""Largest difference from Keras, relative to the largest output if that exceeds 1."""
_BAG = 300
"""Patches of the bag that the outputs are compared on."""
Inputs = dict[str, NDArray[Any]]


@dataclass(frozen=True, repr=False)
class ModelExport(Result):
    """Result of exporting a model: its files, and the largest difference of ONNX outputs from those of Keras."""

    files: tuple[Path, ...]
    description: Path
    difference: float | None = None

    def __str__(self) -> str:
        checked = "" if self.difference is None else f"; equals Keras to {self.difference:.1g}"
        return f"{', '.join(map(str, [*self.files, self.description]))}{checked}"


def export_model(run: Path, *, out: Path, to: ModelFormat) -> ModelExport:
    """Write the model of a finished run into a folder as `model.onnx` or `model.keras`, with `model.json`.

    ONNX files are compared with Keras on random input. Of a patch model, there is a second one, whose input is
    (N, 3, H, W) float32.

    Raises:
        UsageError: the run has not finished, or the folder has the files.
        DamagedStore: the run cannot be read.
        MachineShort: tf2onnx or onnxruntime is not installed.
    """
    finished = read_run(run)
    stem = run_folder.MODEL.partition(".")[0]
    path, description = out / f"{stem}.{to}", out / f"{stem}.json"
    for file in (path, description):
        if file.exists():
            raise UsageError(f"{file} exists", todo="remove it, or choose another --out")
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
    with roomy(out):
        if to == "keras":
            with atomic_write(path) as part:
                shutil.copyfile(run / run_folder.MODEL, part)
            files, difference, inputs = [path], None, None
        else:
            files, difference, inputs = _write_onnx(finished, path)
        values = _describe(finished, inputs)
        values["files"] = {file.name: file_sha256(file) for file in files}
        write_json(description, values)
    return ModelExport(tuple(files), description, difference)


def _write_onnx(run: FinishedRun, path: Path) -> tuple[list[Path], float, dict[str, Any]]:
    """Write the ONNX files, and return them, the largest difference from Keras, and the opset."""
    keras = load_quietly("keras")
    model = _in_float32(keras.models.load_model(run.folder / run_folder.MODEL, safe_mode=True))
    inputs = _random_inputs(model)
    models, files = [(model, inputs)], [path]
    if "image" in inputs:
        models.append((_channels_first(model), {"image": _moved(inputs["image"])}))
        files.append(path.with_name(f"{path.stem}-{CHANNELS_FIRST}.onnx"))
    differences: list[float] = []
    with ExitStack() as stack:  # all files get their names, or none
        parts = [stack.enter_context(atomic_write(file)) for file in files]
        for (each, values), part in zip(models, parts, strict=True):
            differences.append(_convert(each, values, part))
    return files, max(differences), {"opset": OPSET}


def _moved(images: NDArray[Any]) -> NDArray[np.float32]:
    return np.moveaxis(images, -1, 1).astype(np.float32)


def _in_float32(model: keras.Model) -> keras.Model:
    """Return a model that computes in float32, which all runtimes have: the weights of mixed precision are float32."""
    config, keras = json.dumps(model.get_config()), load_quietly("keras")
    for name in ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16"):
        config = config.replace(f'"{name}"', '"float32"')
    plain = keras.Model.from_config(json.loads(config))
    plain.set_weights(model.get_weights())
    return plain


def _channels_first(model: keras.Model) -> keras.Model:
    """Return a patch model that takes (N, 3, H, W) float32."""
    keras = load_quietly("keras")
    image = keras.Input((3, *model.input_shape[1:3]), dtype="float32", name="image")
    pixels = keras.ops.cast(keras.ops.transpose(image, (0, 2, 3, 1)), "uint8")
    return keras.Model(image, model(pixels))


def _random_inputs(model: keras.Model) -> Inputs:
    """Return random input of a model by name."""
    random, values = np.random.default_rng(0), {}
    for tensor in model.inputs:
        shape = [4 if tensor.name == "image" else 1, *(size or _BAG for size in tensor.shape[1:])]
        values[tensor.name] = (
            random.integers(0, 256, shape).astype(np.uint8)
            if tensor.dtype == "uint8"
            else random.normal(size=shape).astype(np.float32)
        )
    return values


def _convert(model: keras.Model, inputs: Inputs, path: Path) -> float:
    """Write a model as ONNX, and return the largest difference of its outputs from those of Keras."""
    try:
        import onnxruntime  # late: the extra [onnx]
        import tf2onnx  # noqa: F401 - Keras uses it
    except ImportError as error:
        raise MachineShort(
            "ONNX needs tf2onnx and onnxruntime, which are not installed",
            found=str(error),
            todo="pip install 'histopipe[onnx]'",
        ) from error
    values = inputs if isinstance(model.input, dict) else next(iter(inputs.values()))
    expected = model(values, training=False)
    expected = expected if isinstance(expected, Mapping) else {"output": expected}
    try:
        with warnings.catch_warnings(action="ignore"):
            model.export(path, format="onnx", verbose=False, opset_version=OPSET)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UsageError(
            "the model cannot be written as ONNX",
            found=str(error).split("\n")[0][:200],
            expected="operations that ONNX has",
            todo="use --to keras; train a run of --pooling dsmil of an earlier version again",
        ) from error
    results = session.run(None, {each.name: inputs[each.name] for each in session.get_inputs()})
    differences = []
    for output, value in zip(session.get_outputs(), results, strict=True):
        plain = np.asarray(expected.get(output.name, expected.get("output")))
        scale = max(1.0, float(np.abs(plain).max()))
        differences.append(float(np.abs(value - plain).max()) / scale)
    if not max(differences) <= _TOLERANCE:
        raise HistopipeError(
            "the ONNX file does not compute what Keras does",
            found=f"a difference of {max(differences):.2g}",
            expected=f"at most {_TOLERANCE:g}",
        )
    return max(differences)


def _describe(run: FinishedRun, onnx: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a program has to know of a model, as JSON values."""
    config, metrics, of_bags = run.config, run.metrics, isinstance(run.config, BagTrainConfig)
    recorded = ("targets", "objective", "backbone", "encoders", "covariates", "spec", "patch_mpp")
    return {
        "histopipe": __version__,
        "task": config.task,
        "classes": list(run.classes),
        "outputs": list(run.task.names),
        "input": "features of the encoder, (1, N, D) float32"
        if of_bags
        else "RGB from 0 to 255: (N, H, W, 3) uint8, or channels first (N, 3, H, W) float32; preprocessing is inside",
        "stain_norm": getattr(config, "stain_norm", "none"),
        "temperature": list(run.temperature),
        "thresholds": {name: asdict(each) for name, each in run.thresholds.items()},
        "positive": config.evaluation_settings.positive,
        **{name: metrics[name] for name in recorded if metrics.get(name)},
        **(onnx or {}),
    }
