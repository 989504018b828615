"""Backbones: networks from patches to features, from every source that `--model` names."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
from keras import layers, ops

from histopipe.errors import HistopipeError, UsageError
from histopipe.pretrained.architecture import NAMINGS, resampling_matrix, select
from histopipe.pretrained.checkpoints import read_tensors
from histopipe.pretrained.encoders import (
    KERAS,
    SAVED_MODEL,
    find_weights,
    named_preset,
    own_file,
    with_published_settings,
)
from histopipe.pretrained.presets import Preprocessing, Preset, preset_names
from histopipe.runs.defaults import SMALL_CNN
from histopipe.system.files import file_sha256
from histopipe.system.output import message
from histopipe.training.devices import is_out_of_memory
from histopipe.training.pretrained_networks import (
    MEAN,
    SCALES,
    STD,
    assign_weights,
    efficientnet_lite,
    vision_transformer,
)

_PIL_ONE = 1 << 22
"""1 in the fixed-point numbers that PIL resizes with."""


def prepare(image: keras.KerasTensor, settings: Preprocessing) -> keras.KerasTensor:
    """Return (B, S, S, 3) inputs of a network for (B, H, H, 3) uint8 RGB images."""
    exact = keras.config.dtype_policy().variable_dtype
    if image.shape[1] != settings.resized:
        image = _resized(image, settings)
    first = (settings.resized - settings.size) // 2
    if settings.resized != settings.size:
        last = settings.resized - settings.size - first
        image = layers.Cropping2D(((first, last), (first, last)), dtype=exact)(image)
    std = np.array(settings.std)
    scale, offset = 1 / (255 * std), -np.array(settings.mean) / std
    return layers.Rescaling(scale.tolist(), offset.tolist(), dtype=exact, name="normalize")(image)


def _resized(image: keras.KerasTensor, settings: Preprocessing) -> keras.KerasTensor:
    """Resize as PIL does, bit for bit: first along rows, then along columns, each rounded to 8 bits.

    Two products of matrices, because TensorFlow's resizing does not round between both passes, and XLA cannot compile
    it. In float64, since GPUs compute float32 products with 10 bits (TensorFloat-32).
    """
    source, target = image.shape[1], settings.resized
    matrix = resampling_matrix(source, target, settings.interpolation)
    # PIL's weights have 22 bits after the point, rounded half away from zero. Sums are exact in float64.
    matrix = np.trunc(matrix * _PIL_ONE + np.copysign(0.5, matrix)) / _PIL_ONE
    image = ops.cast(image, "float64")
    for equation, shape in (
        ("bhwc,wx->bhxc", (source, target, 3)),
        ("bhwc,hy->bywc", (target, target, 3)),
    ):
        product = layers.EinsumDense(equation, shape, dtype="float64", trainable=False)
        image = ops.floor(ops.clip(product(image), 0, 255) + 0.5)
        product.set_weights([matrix])
    return image


_NO_FILE = ("none", "imagenet")
"""Values of `--weights` that are not a file."""
_ENDPOINT = "serving_default"
"""Signature of a SavedModel that Keras and TensorFlow write by default."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """A network from patches to features.

    Attributes:
        core: network from prepared images to (B, D) features.
        prepare: stock layers from (B, H, H, 3) uint8 RGB to the input of `core`.
        description: preprocessing and origin of the weights, as JSON values.
    """

    core: keras.Model
    prepare: Callable[[keras.KerasTensor], keras.KerasTensor]
    description: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, image: keras.KerasTensor, **options: Any) -> keras.KerasTensor:
        """Return the (B, D) features of (B, H, H, 3) uint8 RGB images."""
        features = self.core(self.prepare(image), **options)
        return keras.layers.Flatten()(features) if len(features.shape) > 2 else features


def build_backbone(
    model: str, *, patch_size: int, weights: str, training: bool, whole: bool = False
) -> Backbone:
    """Build the network that `--model` and `--weights` name, with its weights.

    Args:
        model: "efficientnet-lite0", "-lite1" or "-lite2"; "small-cnn", whose weights are random; a network of
            `keras.applications` in any spelling; a preset, or a TOML file of one; a file `.keras`;
            `module.py:function`; a SavedModel folder (embedding only).
        patch_size: side of the patches in pixels.
        weights: "none", "imagenet", or a path.
        training: the network is to be trained.
        whole: the network of a preset sees the whole patch: it is resized, and not cropped, to the input.

    Raises:
        UsageError: there is no such model, its weights are missing or do not fit, or patches are too small.
    """
    preset, path = named_preset(model), own_file(model)
    if path is not None:
        return _own(model, path, preset, patch_size, weights, training=training)
    if preset is not None:
        return _preset(preset, weights, training=training, whole=whole)
    if model != SMALL_CNN:
        return _application(model, patch_size, weights, training=training)
    if weights != "none":
        raise UsageError(
            f"--weights {weights}", expected=f"none: {SMALL_CNN} has no trained weights"
        )
    return Backbone(_small_cnn(patch_size), keras.layers.Rescaling(1 / 127.5, offset=-1))


@contextlib.contextmanager
def _unusable(
    what: str, *, most: int = 200, with_type: bool = False, **hints: Any
) -> Iterator[None]:
    """Report any error of a network that cannot be built or loaded as a usage error, except that memory ran out."""
    try:
        yield
    except HistopipeError:
        raise
    except Exception as error:  # Keras, TensorFlow and the user's code raise errors of many classes
        if is_out_of_memory(error):
            raise
        name = f"{type(error).__name__}: " if with_type else ""
        raise UsageError(what, found=name + str(error).split("\n")[0][:most], **hints) from error


def _preset(preset: Preset, weights: str, *, training: bool, whole: bool = False) -> Backbone:
    if weights in _NO_FILE:
        raise UsageError(
            f"--model {preset.name} --weights {weights}",
            expected="--weights with the file of the weights",
            todo=f"see `histopipe encoders {preset.name}`" if preset.repository else None,
        )
    path, network = Path(weights), preset.architecture
    if network is None:
        if not (path / SAVED_MODEL).is_file():
            raise UsageError(
                f"--weights {weights}", found=f"no {SAVED_MODEL}", expected="a SavedModel folder"
            )
        return _saved_model(path, preset, training=training)
    path = find_weights(preset, path)
    preset, notes = with_published_settings(preset, path)
    for note in notes:
        message(note)
    if whole:
        preset = replace(preset, input=replace(preset.preprocessing, resize=0))
    naming, settings = NAMINGS[preset.naming], preset.preprocessing
    tensors = select(read_tensors(path), network, naming, settings.trained, path)
    core = vision_transformer(network, settings.size)
    assign_weights(core, network, naming, tensors)
    return _prepared(core, preset, {"weights": path.name, "weights_sha256": file_sha256(path)})


def _prepared(core: keras.Model, preset: Preset, description: Mapping[str, Any]) -> Backbone:
    settings, shape, network = preset.preprocessing, core.input_shape[1:], preset.architecture
    if shape not in ((settings.size, settings.size, 3), (None, None, 3)):
        raise UsageError(
            f"the input of {preset.name}",
            found=f"shape {shape}",
            expected=f"({settings.size}, {settings.size}, 3), as in its preset",
        )
    description = {
        "preset": preset.name,
        "preprocessing": json.loads(json.dumps(asdict(settings))),  # lists for tuples
        **description,
        **({} if network is None else {"architecture": asdict(network)}),
    }
    return Backbone(core, partial(prepare, settings=settings), description)


def _own(
    model: str, path: Path, preset: Preset | None, patch_size: int, weights: str, *, training: bool
) -> Backbone:
    if preset is not None and path.is_dir():
        if weights not in _NO_FILE:
            raise UsageError(
                f"--weights {weights}", found=f"--model {model}, which contains weights"
            )
        return _saved_model(path, preset, training=training)
    with _unusable(f"--model {model} cannot be used", with_type=True):
        core = (
            keras.models.load_model(path, safe_mode=True, compile=False)  # runs no code
            if path.suffix == KERAS
            else _call(model, path, preset.preprocessing.size if preset else patch_size)
        )
        if weights not in _NO_FILE:
            core.load_weights(weights)
        shapes = core.input_shape, core.output_shape
    fits = (
        all(isinstance(shape, tuple) and None in shape[:1] for shape in shapes)
        and (len(shapes[0]), len(shapes[1])) == (4, 2)
        and shapes[0][-1] == 3
        and type(shapes[1][1]) is int
    )
    if not fits or (
        preset is None and shapes[0][1:3] not in ((patch_size, patch_size), (None, None))
    ):
        raise UsageError(
            f"--model {model}",
            found=f"input {shapes[0]}, output {shapes[1]}",
            expected=f"input (None, {patch_size}, {patch_size}, 3) and output (None, features)"
            if preset is None
            else "input (None, size, size, 3) and output (None, features)",
        )
    description = {
        "file": path.name,
        "file_sha256": file_sha256(path),
        "function": model.partition(".py:")[2],
    }
    if preset is not None:
        return _prepared(core, preset, description)
    # Floating-point numbers from 0 to 255.
    exact = keras.config.dtype_policy().variable_dtype
    return Backbone(core, layers.Rescaling(1.0, dtype=exact), description)


def _call(model: str, path: Path, size: int) -> keras.Model:
    """Call the user's function with the side of its input in pixels."""
    name = model.rpartition(":")[2]
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules.setdefault(path.stem, module)  # where Keras looks for the classes in it
    sys.path.insert(0, str(path.parent.absolute()))  # it may import its neighbours
    try:
        SourceFileLoader(path.stem, str(path)).exec_module(module)
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if isinstance(value, types.FunctionType)
        ]
        raise UsageError(
            f"--model {model}",
            found=f"no function {name!r} in {path}",
            expected=" or ".join(functions) or "a function",
        )
    core = function(size)
    if not isinstance(core, keras.Model):
        raise UsageError(
            f"--model {model}",
            found=f"a {type(core).__name__}",
            expected="a function that returns a keras.Model",
        )
    return core


def _saved_model(path: Path, preset: Preset, *, training: bool) -> Backbone:
    if training:
        raise UsageError(
            f"{path} is a SavedModel, which cannot be trained",
            todo="compute features with `histopipe embed`, and train a slide model on them with --mil",
        )
    message(f"{path} is a SavedModel, which can run any code: use only files that you trust")
    size = preset.preprocessing.size
    image = keras.Input((size, size, 3), name="pixels")
    with _unusable(
        f"{path} cannot be used",
        expected=f"a SavedModel with the signature {_ENDPOINT}, from (patches, {size}, {size}, 3) to features",
    ):
        features = keras.layers.TFSMLayer(str(path), call_endpoint=_ENDPOINT)(image)
    outputs = list(features.values()) if isinstance(features, dict) else [features]
    if len(outputs) != 1:
        raise UsageError(
            f"{path}: outputs", found=", ".join(features), expected="one output, the features"
        )
    digests = {
        str(file.relative_to(path)): file_sha256(file)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    return _prepared(
        keras.Model(image, outputs[0]), preset, {"file": path.name, "file_sha256": digests}
    )


def _small_cnn(patch_size: int) -> keras.Model:
    """One convolution block and one dense layer: enough to test a pipeline."""
    image = keras.Input((patch_size, patch_size, 3))
    x = keras.layers.Conv2D(32, 7, strides=2, padding="same", activation="relu")(image)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.MaxPooling2D(2)(x))
    return keras.Model(image, keras.layers.Dense(64, activation="relu")(x), name="small_cnn")


def _application(model: str, patch_size: int, weights: str, *, training: bool) -> Backbone:
    build = None if model in SCALES else _find_application(model, training=training)
    # As documented by Keras, which has no public function for it. `Path.home` would fail without a home.
    home = Path(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras"))  # noqa: PTH111
    todo = (
        "imagenet weights are downloaded once; without a network, copy the file named above to "
        f"{home / 'models'}, or pass it as --weights FILE"
    )
    with _unusable(
        f"--model {model} --weights {weights}",
        most=300,
        todo=todo if weights == "imagenet" else None,
    ):
        if build is None:
            core = efficientnet_lite(model, trained=weights == "imagenet")
        else:
            with contextlib.redirect_stdout(sys.stderr):  # Keras prints downloads
                core = build(
                    include_top=False,
                    weights="imagenet" if weights == "imagenet" else None,
                    input_shape=(patch_size, patch_size, 3),
                    pooling="avg",
                )
        if weights not in _NO_FILE:
            core.load_weights(weights)
    if build is None:
        return Backbone(core, keras.layers.Rescaling(1 / STD, offset=-MEAN / STD))
    preprocess = sys.modules[build.__module__].preprocess_input
    return Backbone(core, partial(_preprocessed, preprocess=preprocess))


def _find_application(model: str, *, training: bool) -> Callable[..., keras.Model]:
    plain = {n.lower(): n for n in dir(keras.applications) if n[0].isupper()}
    name = plain.get(model.lower().replace("-", "").replace("_", ""))
    if name is None:
        alternatives = [
            *SCALES,
            SMALL_CNN,
            *(() if training else ("a run's folder", "an ONNX file", "a SavedModel folder")),
            "a .keras file",
            "module.py:function",
            *preset_names(),
            *sorted(plain.values()),
        ]
        raise UsageError(
            f"--model {model}", found="no such model", expected=", ".join(alternatives)
        )
    return cast(Callable[..., keras.Model], getattr(keras.applications, name))


def _preprocessed(image: keras.KerasTensor, preprocess: Callable[[Any], Any]) -> keras.KerasTensor:
    """Return the preprocessing of a network as stock layers, so that a saved model takes uint8 RGB.

    Every `preprocess_input` of Keras is a scale, an offset and an optional change from RGB to BGR. They are measured on
    four colours.
    """
    colours = np.concatenate([np.zeros((1, 3)), 255 * np.eye(3)]).reshape(4, 1, 1, 3)
    seen = np.asarray(preprocess(colours.astype(np.float32))).reshape(4, 3)
    offset, matrix = seen[0], (seen[1:] - seen[0]) / 255  # row: channel in, column: channel out
    swapped = matrix[0, 0] == 0 and matrix[0, 2] != 0
    scale = np.diag(matrix[::-1] if swapped else matrix)
    if not np.allclose(matrix, np.diag(scale)[::-1] if swapped else np.diag(scale), atol=1e-6):
        raise UsageError("--model", found="preprocessing other than a scale and an offset")
    if swapped:
        image = keras.ops.flip(image, axis=-1)
    return keras.layers.Rescaling(scale.tolist(), offset=offset.tolist())(image)
