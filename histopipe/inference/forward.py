"""Patches through a trained network, on all devices of a strategy, in pieces that fit into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.batch_sampler import replica_rows
from histopipe.errors import DamagedStore, UsageError
from histopipe.runs import folder as run_folder
from histopipe.system.progress import message
from histopipe.training.devices import make_strategy
from histopipe.training.memory import MicroBatch

_SEED = 1
"""Of weights that are not trained, so that they are the same each time."""


class Forward:
    """A network on the devices of a strategy.

    Args:
        make: makes it, within the strategy's scope.
        devices: as for training.
        batch_size: patches at once, over all devices.

    Attributes:
        dimension: numbers that come out for each patch.
        patch_size: side of the patches that go in.
        sha256: of its weights.

    Raises:
        UsageError: no such device, or fewer patches than devices.
    """

    def __init__(self, make: Callable[[], keras.Model], *, devices: str, batch_size: int) -> None:
        self._strategy = make_strategy(devices)
        keras.utils.set_random_seed(_SEED)
        with self._strategy.scope():
            self._model = make()
        self.dimension = int(self._model.output_shape[-1])
        self.patch_size = int(self._model.input_shape[1])
        self.sha256 = _digest(self._model)
        count = self._strategy.num_replicas_in_sync
        if batch_size < count:
            raise UsageError(
                "--batch-size", found=batch_size, expected=f"{count} or more: one a device"
            )
        self._parts = [replica_rows(batch_size, count, replica) for replica in range(count)]
        self._micro_batch = MicroBatch(max(map(len, self._parts)), changed=_tell)

    def prepared(self, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The images: the network takes them as they are."""
        return images

    def start(self, inputs: NDArray[np.uint8]) -> list[Sequence[tf.Tensor]]:
        """Begin with a whole batch, in pieces that fit into memory: by piece and device, (b, D)."""
        return self._micro_batch.fit(lambda size: self._in_pieces(inputs, size))

    def features(self, started: list[Sequence[tf.Tensor]]) -> NDArray[np.float32]:
        """(B, D), in the batch's order."""
        by_device = zip(*started, strict=True)
        return np.concatenate([part.numpy() for pieces in by_device for part in pieces])

    def _in_pieces(self, images: NDArray[np.uint8], size: int) -> list[Sequence[tf.Tensor]]:
        pieces = []
        for first in range(0, max(map(len, self._parts)), size):
            own = [images[part.start : part.stop][first : first + size] for part in self._parts]
            pieces.append(self._piece(own))
        return pieces

    def _piece(self, parts: Sequence[NDArray[np.uint8]]) -> Sequence[tf.Tensor]:
        def part(context: tf.distribute.ValueContext) -> tf.Tensor:
            return tf.constant(parts[int(context.replica_id_in_sync_group)])

        batch = self._strategy.experimental_distribute_values_from_function(part)
        found: Sequence[tf.Tensor] = self._strategy.experimental_local_results(self._step(batch))
        return found

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]  # tensorflow has no types
    def _step(self, batch: Any) -> Any:
        return self._strategy.run(self._on_device, args=(batch,))

    def _on_device(self, images: tf.Tensor) -> tf.Tensor:
        return tf.cast(self._model(images, training=False), tf.float32)


def trained_model(folder: Path, patch_size: int | None = None) -> keras.Model:
    """The model of a run on patches.

    Args:
        folder: the run's.
        patch_size: side of the patches that it is to take; any if not given.

    Raises:
        UsageError: there is none, it takes features, or patches of another size.
        DamagedStore: it cannot be read.
    """
    path = folder / run_folder.MODEL
    if not path.exists():
        raise UsageError(
            f"{folder} holds no trained model", expected=f"a {run_folder.MODEL} in it",
            todo=f"go on with `histopipe train --resume --out {folder}`",
        )  # fmt: skip
    try:
        model = keras.models.load_model(path, safe_mode=True)  # no code from the file
        shape = model.input_shape
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStore(
            f"{path} cannot be read", found=str(error).split("\n")[0][:200],
            expected="the model of a patch training",
        ) from error  # fmt: skip
    if len(shape) != 4:
        raise UsageError(
            f"the model of {folder} takes features, not patches",
            todo="take the encoder that made them",
        )
    if patch_size not in (None, shape[1]):
        raise UsageError(
            f"the model of {folder} was trained on other patches", found=f"{shape[1]} pixels",
            expected=f"{patch_size}, as the store's are",
        )  # fmt: skip
    return model


def _digest(model: keras.Model) -> str:
    digest = hashlib.sha256()
    for value in model.get_weights():
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _tell(size: int, why: str) -> None:
    message(f"memory ran out ({why}): going on with {size} patches a device at once")
