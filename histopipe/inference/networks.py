"""Keras networks on all devices of a strategy: the model of a run, and encoders. Imports TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, OutOfMemory, UsageError, first_line, reported_as
from histopipe.inference.slide_run import Network, device_rows
from histopipe.pretrained.encoders import named_preset, own_file
from histopipe.runs import folder as run_folder
from histopipe.runs.config import Precision
from histopipe.runs.run import METRICS, Run
from histopipe.runs.task_config import BagTrainConfig
from histopipe.splits.labelling import Covariates
from histopipe.system.output import counted, message
from histopipe.tasks.task import Task
from histopipe.training.backbones import build_backbone
from histopipe.training.bag_model import ATTENTION, BagModel, Patches, feature_dimension
from histopipe.training.bag_pooling import PIECE, patch_values, pool, pool_at_once
from histopipe.training.devices import (
    MicroBatch,
    is_out_of_memory,
    make_strategy,
    one_per_replica,
)
from histopipe.training.models import (
    LOGITS,
    check_weights,
    digest,
    dtype_policy,
    fuse_batch_norms,
    values_of,
    without_last_layer,
)
from histopipe.training.objective import Objective
from histopipe.training.objectives import objective_class

_SEED = 1
"""Seed of untrained weights, which makes them reproducible."""
_BATCH_SIZES = tuple(2**power for power in range(11))
"""Patches per device that "auto" tries."""
_WORTHWHILE = 1.05
"""Minimum gain in throughput for a larger batch."""
_SIZES_WITHOUT_GAIN, _TRIAL_SECONDS = 2, 0.3


class KerasNetwork:
    """A Keras model, created by `make`, on all devices. It computes in smaller pieces if memory runs out.

    `batch_size` "auto" measures several sizes, and takes the fastest that fits into memory.

    Raises:
        UsageError: a device does not exist, a batch has fewer patches than devices, or a weight is not finite.
    """

    def __init__(
        self,
        make: Callable[[], keras.Model],
        *,
        name: str,
        devices: str,
        batch_size: int | Literal["auto"],
        xla: bool = False,
    ) -> None:
        self._strategy = make_strategy(devices)
        keras.utils.set_random_seed(_SEED)
        with self._strategy.scope():
            self.model = make()
        fuse_batch_norms(self.model, training=False)
        check_weights(self.model.weights, name, "use another model, or train it again")
        self.dimension = int(self.model.output_shape[-1])
        self.patch_size = int(self.model.input_shape[1])
        self.identity: Mapping[str, Any] = {
            "encoder": name,
            "dimension": self.dimension,
            "patch_size": self.patch_size,
            "sha256": digest(self.model.weights),
        }
        compute = (
            tf.function(self._compute, autograph=False, jit_compile=True) if xla else self._compute
        )
        # One device: traced once, for batches of any size. Several devices have no such signature: traced twice.
        one = self._strategy.num_replicas_in_sync == 1
        self._step = tf.function(
            lambda batch: self._strategy.run(compute, args=(batch,)),
            input_signature=[tf.TensorSpec((None, self.patch_size, self.patch_size, 3), tf.uint8)]
            if one
            else None,
            reduce_retracing=not one,
            autograph=False,
        )
        # XLA compiles, and GPUs choose algorithms, for each size: powers of two are few.
        self._few_sizes = xla or bool(tf.config.get_visible_devices("GPU"))
        self.batch_size = self._fastest() if batch_size == "auto" else batch_size
        self._micro_batch = MicroBatch(
            max(map(len, device_rows(self.batch_size, self._strategy.num_replicas_in_sync))),
            changed=lambda size, why: message(
                f"memory ran out ({why}): continuing with {counted(size, 'patch')} per device at once"
            ),
        )

    def _fastest(self) -> int:
        """Return the batch size with the highest throughput. A larger one has to be clearly faster."""
        best, fastest, without_gain = 0, 0.0, 0
        for per_device in _BATCH_SIZES:
            size = per_device * self._strategy.num_replicas_in_sync
            try:
                rate = self._throughput(size, per_device)
            except tf.errors.ResourceExhaustedError:
                break
            without_gain = 0 if rate > fastest * _WORTHWHILE else without_gain + 1
            if not without_gain:
                best, fastest = size, rate
            elif without_gain == _SIZES_WITHOUT_GAIN:
                break
        if not best:
            raise OutOfMemory("memory ran out with a single patch", todo="use a smaller --model")
        message(f"batch size {best}: {fastest:,.0f} patches/s on patches in memory")
        return best

    def _throughput(self, size: int, per_device: int) -> float:
        """Return patches per second, on patches in memory."""
        images = np.zeros((size, self.patch_size, self.patch_size, 3), np.uint8)
        self.finish(self._in_pieces(images, per_device))  # traces and compiles
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < _TRIAL_SECONDS:
            self.finish(self._in_pieces(images, per_device))
            count += size
        return count / (time.perf_counter() - began)

    def prepare(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the images unchanged: the model takes uint8 RGB."""
        return images

    def start(self, inputs: NDArray[np.uint8]) -> list[Sequence[tf.Tensor]]:
        """Start computing a batch, and return the (b, D) results by piece and device."""
        rows = max(len(inputs), self._strategy.num_replicas_in_sync)
        if self._few_sizes:
            rows = min(max(rows, self.batch_size), 1 << (rows - 1).bit_length())
        if rows > len(inputs):  # rows are repeated
            inputs = np.resize(inputs, (rows, *inputs.shape[1:]))
        return self._micro_batch.fit(lambda size: self._in_pieces(inputs, size))

    def finish(self, started: list[Sequence[tf.Tensor]]) -> NDArray[np.float32]:
        """Wait for the (B, D) results, in the order of the batch; see `Network`."""
        return np.concatenate(
            [part.numpy() for pieces in zip(*started, strict=True) for part in pieces]
        )

    def _in_pieces(self, images: NDArray[np.uint8], size: int) -> list[Sequence[tf.Tensor]]:
        pieces, parts = [], device_rows(len(images), self._strategy.num_replicas_in_sync)
        for first in range(0, max(map(len, parts)), size):
            batch = one_per_replica(
                self._strategy,
                [
                    tf.constant(images[part.start : part.stop][first : first + size])
                    for part in parts
                ],
                0,
            )
            pieces.append(self._strategy.experimental_local_results(self._step(batch)))
        return pieces

    def _compute(self, images: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.model(images, training=False), tf.float32)


def keras_encoder(
    model: str | Path,
    *,
    weights: str,
    patch_size: int,
    devices: str,
    batch_size: int | Literal["auto"],
    precision: Precision = "float32",
    xla: bool = False,
) -> KerasNetwork:
    """Load an encoder: the model of a run (a path) without its last layer, or a model as for `build_backbone`.

    Raises:
        UsageError: the network, weights or device do not exist, or the patch size is wrong.
        DamagedStore: the model of the run cannot be read.
    """
    description: dict[str, Any] = {}

    def make() -> keras.Model:
        if isinstance(model, Path):
            return _without_last_layer(model, patch_size)
        with dtype_policy(precision):
            image = keras.Input((patch_size, patch_size, 3), dtype="uint8", name="image")
            backbone = build_backbone(model, patch_size=patch_size, weights=weights, training=False)
            description.update(backbone.description, precision=precision, xla=xla)
            return keras.Model(image, backbone(image), name="encoder")

    network = KerasNetwork(make, name=str(model), devices=devices, batch_size=batch_size, xla=xla)
    has_weights = isinstance(model, Path) or named_preset(model) or own_file(model)
    network.identity = {
        **network.identity,
        "encoder": Path(model).name if has_weights else f"{model} ({weights})",
        **description,
    }
    return network


def load_model(folder: Path) -> keras.Model:
    """Load the model of a run.

    Raises:
        UsageError: there is none.
        DamagedStore: it cannot be read.
    """
    path = folder / run_folder.MODEL
    if not path.exists():
        raise UsageError(
            f"{folder} holds no trained model",
            expected=f"a file {run_folder.MODEL}",
            todo=f"finish the run with `histopipe train --resume --out {folder}`",
        )
    with reported_as(
        DamagedStore,
        f"{path} cannot be read",
        (OSError, ValueError, KeyError, TypeError),
        reason=first_line,
        expected="the model of a run",
    ):
        return keras.models.load_model(path, safe_mode=True)  # runs no code from the file


def load_run_model(folder: Path, patch_size: int | None = None) -> keras.Model:
    """Load the patch model of a run. Any patch size is accepted if `patch_size` is None. Raises as `load_model`.

    Raises:
        UsageError: it takes features, or patches of another size.
    """
    model = load_model(folder)
    shape: Any = getattr(model, "input_shape", ())
    if len(shape) != 4:
        raise UsageError(
            f"the model of {folder} takes features, not patches",
            todo="use the encoder that computed the features",
        )
    if patch_size not in (None, shape[1]):
        raise UsageError(
            f"the model of {folder} takes patches of another size",
            found=f"{shape[1]} pixels",
            expected=f"{patch_size}, as in the store",
        )
    return model


def load_run_models(
    folders: Sequence[Path],
    whitening: Sequence[NDArray[np.float32]] = (),
    *,
    of_features: bool = False,
) -> keras.Model:
    """Load the patch models of runs as one, with the outputs of all side by side. Raises as `load_run_model`.

    With the whitening of each training's range, the whitened features follow the outputs of each model.
    """
    models = [load_model(folder) if of_features else load_run_model(folder) for folder in folders]
    if whitening:
        models = [_with_white(m, w) for m, w in zip(models, whitening, strict=True)]
    if len(models) == 1:
        return models[0]
    shape = models[0].input_shape
    for folder, model in zip(folders, models, strict=True):
        if model.input_shape != shape:
            raise UsageError(
                f"the model of {folder} takes other patches or features",
                found=model.input_shape[1],
                expected=shape[1],
            )
    image = keras.Input(shape[1:], dtype=models[0].inputs[0].dtype, name="image")
    outputs = [
        keras.Model(model.inputs, model.outputs[0], name=f"model_{number}")(image)
        for number, model in enumerate(models, 1)
    ]
    return keras.Model(image, keras.layers.Concatenate(dtype="float32")(outputs))


def after_encoder(model: keras.Model, encoder: Network) -> keras.Model:
    """Return a patch model on features after their encoder, from images. Raise a UsageError for an ONNX file."""
    if not isinstance(encoder, KerasNetwork):
        raise UsageError(
            "the model with its encoder",
            found="an ONNX file",
            expected="an encoder of Keras",
            todo="use --to keras",
        )
    return keras.Model(encoder.model.input, model(encoder.model.output))


class FeatureNetwork:
    """The patch models of runs on features; see `load_run_models`.

    `encoder` computes the features from patches. Without it, they are given in the place of images.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        whitening: Sequence[NDArray[np.float32]],
        encoder: Network | None,
        batch_size: int,
    ) -> None:
        self._model = load_run_models(folders, whitening, of_features=True)
        check_weights(self._model.weights, folders[0].name, "train it again")
        self._encoder = encoder
        self.dimension = int(self._model.output_shape[-1])
        self.batch_size = batch_size if encoder is None else encoder.batch_size
        self.identity: Mapping[str, Any] = {"sha256": digest(self._model.weights)}

    def prepare(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return the input of the encoder."""
        return images if self._encoder is None else self._encoder.prepare(images)

    def start(self, inputs: NDArray[Any]) -> Any:
        """Start the encoder."""
        return inputs if self._encoder is None else self._encoder.start(inputs)

    def finish(self, started: Any) -> NDArray[np.float32]:
        """Wait for the (B, D) results of the models; see `Network`."""
        features = started if self._encoder is None else self._encoder.finish(started)
        return np.asarray(self._model(tf.constant(features), training=False), np.float32)


def _with_white(model: keras.Model, whitening: NDArray[np.float32]) -> keras.Model:
    """Return a model with the whitened input of its last layer after its outputs."""
    features = keras.ops.cast(without_last_layer(model).output, "float32")
    outputs = [keras.ops.cast(model.outputs[0], "float32"), keras.ops.matmul(features, whitening)]
    return keras.Model(model.inputs, keras.ops.concatenate(outputs, axis=1))


def _without_last_layer(folder: Path, patch_size: int) -> keras.Model:
    model = load_run_model(folder, patch_size)
    try:
        return without_last_layer(model)
    except ValueError as error:
        raise DamagedStore(
            f"the model of {folder} has no layer {LOGITS!r}",
            expected="the model of a run on patches",
        ) from error


def _described(
    run: Run, config: BagTrainConfig
) -> tuple[Covariates | None, Objective, Sequence[Mapping[str, Any] | None]]:
    """Return covariates, objective and encoders of a slide model, as its training has recorded them."""
    metrics = run.metrics_file
    try:
        task = run.task
        recorded = metrics.get("covariates")
        objective = objective_class(config.task, config.used_loss)(
            len(task.classes if task.of_classes else task.columns),
            config.used_loss,
            metrics.get("objective", {}),
        )
        covariates = None if recorded is None else Covariates.from_json(recorded)
        return covariates, objective, metrics.get("encoders") or [None] * len(config.mil)
    except (KeyError, TypeError) as error:
        raise DamagedStore(
            f"{run.folder / METRICS} is damaged, or of an earlier version",
            found=repr(error)[:200],
            todo=f"evaluate the model again with `histopipe train --resume --out {run.folder}`",
        ) from error


class TrainedBags:
    """The slide model of a finished run, on the first of its devices.

    Attributes:
        run, config: the run, and its settings.
        task: task of the training, with the form of the predictions.
        covariates: covariates that the model takes, if any.
        encoders: record of the encoder of each feature set; None for those of other tools.
        dimension: features per patch.
        sha256: hash of the weights.
        takes_positions: whether the model takes the positions of patches.
        uses_features: whether the slides have a part in the predictions, and not the covariates alone.

    Raises:
        DamagedStore: the run or its model cannot be read.
        UsageError: its weights are not finite.
    """

    def __init__(self, run: Run, *, devices: str) -> None:
        assert isinstance(run.config, BagTrainConfig)  # noqa: S101 - the caller has checked it
        self.run, self.config = run, run.config
        self.covariates, self._objective, self.encoders = _described(run, run.config)
        self.task: Task = self._objective.described(run.task)
        self._device = make_strategy(devices).extended.worker_devices[0]
        path = run.folder / run_folder.MODEL
        with tf.device(self._device):
            self._model = self._load(path)
        check_weights(self._model.serving.weights, str(path), "train the model again")
        self.dimension = feature_dimension(self._model.serving)
        self.sha256 = digest(self._model.serving.weights)
        self.takes_positions = self._model.takes_positions
        self.uses_features = self._model.uses_features

    def _load(self, path: Path) -> BagModel:
        with reported_as(
            DamagedStore,
            f"{path} cannot be read",
            (OSError, ValueError, KeyError, TypeError, IndexError),
            reason=first_line,
            expected="the model of a run on bags",
        ):
            saved = keras.models.load_model(path, safe_mode=True)  # runs no code from the file
            layers = {layer.name: layer for layer in saved.layers}
            hidden = layers.get("attention_tanh")
            model = BagModel(
                self.config.pooling,
                dimension=feature_dimension(saved),
                objective=self._objective,
                dropout=0.0,
                covariates=0 if self.covariates is None else len(self.covariates.inputs),
                scaled="scaling" in layers,
                attention=ATTENTION if hidden is None else hidden.units,
            )
            model.serving.set_weights(saved.get_weights())
        return model

    def slopes(self, rows: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the (C, R, D) slopes of the last layer's values for the (R, D) vectors of a bag."""
        model = self._model
        with tf.device(self._device), tf.GradientTape() as tape:
            features = tf.constant(rows, tf.float32)
            tape.watch(features)
            pooled = pool_at_once(model, values_of(model.patch_weights), Patches(features), None)[0]
            logits = pooled[None] @ values_of(model.last_weights)[0][: model.width]
        return np.asarray(tape.jacobian(logits, features)[0], np.float64)

    def named(self, parts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the (N, K) contributions to named predictions of (N, C) parts of the last layer's values."""
        return self._objective.contributions(parts)

    def predict(
        self,
        features: NDArray[np.floating],
        positions: NDArray[np.float32] | None,
        covariates: Sequence[float] | None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.float64]]:
        """Predict a bag from (N, D) features, (N, 2) positions if the model takes them, and encoded covariates.

        Returns:
            (C,) prediction in the form of `predictions.csv`: probabilities, values, or risk and survival; (N,) attention
            with a sum of 1; and (N, K) contributions per named prediction.

        Raises:
            OutOfMemory: the bag is too large.
            DamagedStore: the prediction is not finite.
        """
        model, objective = self._model, self._objective
        try:
            with tf.device(self._device):
                patches = Patches(tf.constant(features), positions)
                pooled = pool(model, values_of(model.patch_weights), patches, tf.constant(PIECE))
                logits = model.logits(
                    values_of(model.last_weights),
                    pooled.value,
                    None if covariates is None else tf.constant([covariates], tf.float32),
                )
                attention, parts = patch_values(model, patches)
        except (tf.errors.OpError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"memory ran out with a bag of {len(features):,} patches",
                todo="use a machine with more memory, or a model with --pooling gated",
            ) from error
        output = objective.predictions(np.asarray(objective.activate(logits), np.float32))[0]
        if not np.isfinite(output).all():
            raise DamagedStore("the prediction is not finite", todo="check features and covariates")
        return output, attention, objective.contributions(parts)
