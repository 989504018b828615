"""Export the model of a run as one file with a description, for programs without histopipe."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from histopipe._version import __version__
from histopipe.errors import HistopipeError, UsageError, first_line, needs_extra, reported_as
from histopipe.inference.options import PredictOptions
from histopipe.predicting.bag_features import patch_encoder
from histopipe.runs import folder as run_folder
from histopipe.runs.run import Run
from histopipe.splits.labelling import Covariates
from histopipe.system.files import atomic_write, file_sha256, make_folder, roomy, write_json
from histopipe.system.output import Result
from histopipe.system.tensorflow import load_quietly

if TYPE_CHECKING:
    import keras

OPSET = 15
"""Version of the ONNX operators: OpenCV and onnxruntime read it."""
CHANNELS_FIRST = "channels-first"
"""Part of the name of the file whose input is (N, 3, H, W) float32, as QuPath and OpenCV make it."""
_TOLERANCE = 1e-4
"""Largest difference from Keras, relative to the largest output if that exceeds 1."""
_BAG = 300
"""Patches of the bag that the outputs are compared on."""
_PLACES = ("given", "stores")
"""What is recorded of an encoder, but concerns this machine only."""
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


def export_model(run: Path, *, out: Path, to: str) -> ModelExport:
    """Write the model of a finished run into a folder as `model.onnx` or `model.keras`, with `model.json`.

    ONNX files are compared with Keras on random input. Of a patch model, there is a second one, whose input is
    (N, 3, H, W) float32.

    Raises:
        UsageError: the run has not finished, or the folder has the files.
        DamagedStore: the run cannot be read.
        MachineShort: tf2onnx or onnxruntime is not installed.
    """
    finished = Run(run)
    stem = run_folder.MODEL.partition(".")[0]
    path, description = out / f"{stem}.{to}", out / f"{stem}.json"
    files = [path]
    if to == "onnx" and not finished.config.on_bags:
        files.append(path.with_name(f"{stem}-{CHANNELS_FIRST}.onnx"))
    for file in (*files, description):
        if file.exists():
            raise UsageError(f"{file} exists", todo="remove it, or choose another --out")
    networks = load_quietly("histopipe.inference.networks")
    model = networks.load_model(run)
    if files[1:] and finished.metrics_file.get("encoders"):
        model = networks.after_encoder(model, patch_encoder(finished, PredictOptions())[1])
    values, difference = _describe(finished, model), None
    make_folder(out)
    with roomy(out):
        if to == "keras":
            with atomic_write(path) as part:
                shutil.copyfile(run / run_folder.MODEL, part)
        else:
            difference = _write_onnx(_named_outputs(_in_float32(model), finished), files)
            values["opset"] = OPSET
        values["files"] = {file.name: file_sha256(file) for file in files}
        write_json(description, values)
    return ModelExport(tuple(files), description, difference)


def _write_onnx(model: keras.Model, files: Sequence[Path]) -> float:
    """Write the ONNX files of a model, and return the largest difference from Keras. A second one has the channels first."""
    inputs = _random_inputs(model)
    models = [(model, inputs)]
    if len(files) > 1:
        images = np.moveaxis(inputs["image"], -1, 1).astype(np.float32)
        models.append((_channels_first(model), {"image": images}))
    with ExitStack() as stack:  # all files get their names, or none
        parts = [stack.enter_context(atomic_write(file)) for file in files]
        return max(_convert(*each, part) for each, part in zip(models, parts, strict=True))


def _outputs(model: keras.Model, run: Run) -> Mapping[str, Any]:
    """Return the outputs of a model by name. Those of a patch model have no name in Keras."""
    output = model.output
    if isinstance(output, Mapping):
        return output
    return {"probability" if run.task.probabilities else "value": output}


def _named_outputs(model: keras.Model, run: Run) -> keras.Model:
    """Return a model whose outputs have names, which become those of the ONNX file."""
    return load_quietly("keras").Model(model.input, dict(_outputs(model, run)))


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
    with needs_extra("onnx", "ONNX needs tf2onnx and onnxruntime, which are not installed"):
        import onnxruntime  # late: the extra [onnx]
        import tf2onnx.handler
    values = inputs if isinstance(model.input, dict) else next(iter(inputs.values()))
    expected = model(values, training=False)
    tf2onnx.handler.tf_op("Erfc")(_Erfc)
    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # the error names the operations, too
    with reported_as(
        UsageError,
        "the model cannot be written as ONNX",
        Exception,
        reason=first_line,
        expected="operations that ONNX has",
        todo="use --to keras",
    ):
        with warnings.catch_warnings(action="ignore"):
            model.export(path, format="onnx", verbose=False, opset_version=OPSET)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    results = session.run(None, {each.name: inputs[each.name] for each in session.get_inputs()})
    differences = []
    for output, value in zip(session.get_outputs(), results, strict=True):
        plain = np.asarray(expected[output.name])
        scale = max(1.0, float(np.abs(plain).max()))
        differences.append(float(np.abs(value - plain).max()) / scale)
    if not max(differences) <= _TOLERANCE:
        raise HistopipeError(
            "the ONNX file does not compute what Keras does",
            found=f"a difference of {max(differences):.2g}",
            expected=f"at most {_TOLERANCE:g}",
        )
    return max(differences)


class _Erfc:
    """How tf2onnx writes the operation 1 - erf(x), which ONNX does not have, and the activation GELU uses."""

    @classmethod
    def version_9(cls, ctx: Any, node: Any, **_: Any) -> None:
        """Replace a node of the graph."""
        inputs, outputs = node.input, node.output
        shapes, dtypes = node.output_shapes, node.output_dtypes
        ctx.remove_node(node.name)
        erf = ctx.make_node("Erf", inputs)
        one = ctx.make_const(f"{node.name}_one", np.array(1, np.float32))
        ctx.make_node(
            "Sub", [one.output[0], erf.output[0]], outputs=outputs, shapes=shapes, dtypes=dtypes
        )


_INPUTS = {
    "image": "RGB from 0 to 255, (N, H, W, 3) uint8; channels first, (N, 3, H, W) float32. Preprocessing is inside",
    "features": "(1, N, D) float32, of the encoders, side by side in their order",
    "of a patch": "(N, D) float32, features of the encoder",
    "positions": "(1, N, 2) float32, x and y of the corners less the smallest ones, divided by the side of a patch",
    "covariates": "(1, K) float32: a number less its mean, divided by its deviation; 1 for the category, 0 for others; of a missing value 0, and 1 for missing",
}
_OUTPUTS = {
    "probability": "not calibrated: divide the logarithms of classes, or the log odds of labels, by temperature, and form probabilities again",
    "value": "in the units of the targets",
    "risk": "logarithm of the hazard: survival at objective.times is objective.baseline to the power of exp(risk)",
    "hazard": "of each interval between objective.edges; survival at its end is the product of 1 - hazard until there, and between the edges, where objective.times are, its logarithm is linear. The risk, to which thresholds apply, is minus the sum of survival at all ends",
    "attention": "(1, N), the share of each patch",
}
"""What the inputs and outputs of a model are, by name."""


def _describe(run: Run, model: keras.Model) -> dict[str, Any]:
    """Return what a program has to know of a model, as JSON values."""
    config, metrics, task = run.config, run.metrics_file, run.task
    task = task.with_settings(config.evaluation_settings)
    recorded = ("targets", "objective", "backbone", "covariates", "spec", "patch_mpp")
    names = {"risk": ["risk"], "hazard": None, "attention": None}
    outputs = {
        name: {"columns": names.get(name, [*task.names]), "content": _OUTPUTS[name]}
        for name in _outputs(model, run)
    }
    inputs: dict[str, dict[str, Any]] = {
        tensor.name: {"content": _INPUTS[tensor.name if tensor.shape[1:-1] else "of a patch"]}
        for tensor in model.inputs
    }
    if "covariates" in inputs:
        inputs["covariates"]["columns"] = [*Covariates.from_json(metrics["covariates"]).inputs]
    values: dict[str, Any] = {
        "histopipe": __version__,
        "task": config.task,
        "inputs": inputs,
        "outputs": outputs,
        "stain_norm": getattr(config, "stain_norm", "none"),
        "temperature": list(run.temperature),
        "thresholds": {name: asdict(each) for name, each in run.result.thresholds.items()},
        **{name: metrics[name] for name in recorded if metrics.get(name)},
        "encoders": [
            {name: value for name, value in (encoder or {}).items() if name not in _PLACES}
            for encoder in metrics.get("encoders") or ()
        ],
    }
    if task.of_classes:
        positive = task.positive
        values["classes"] = [*task.names]
        values["positive"] = None if positive is None else task.names[positive]
    return values
