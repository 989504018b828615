"""How many patches a second a model can be trained with on this machine's devices, with no reader in the way."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from histopipe.errors import MachineShort
from histopipe.store.store import Store
from histopipe.training.devices import make_strategy
from histopipe.training.loop import Trainer
from histopipe.training.models import build_model
from histopipe.training.steps import Steps, StepSettings

_CLASSES = 2


def measure_device(
    stores: Sequence[Store], model: str, batch_sizes: Sequence[int], devices: str, seconds: float
) -> dict[int, float]:
    """Patches a second of training steps on a batch that is at hand, by batch size.

    Args:
        stores: whose patch size is taken.
        model: as `histopipe train --model`.
        batch_sizes: rising; those from the first that does not fit into memory on are left out.
        devices: as `histopipe train --devices`.
        seconds: for each size.

    Raises:
        UsageError: no such model or device.
        MachineShort: not even the smallest batch fits into memory.
    """
    strategy = make_strategy(devices)
    with strategy.scope():
        built = build_model(model, patch_size=stores[0].patch_size, classes=_CLASSES, dropout=0.15)
        optimizer = keras.optimizers.Adam()
    rates: dict[int, float] = {}
    for size in batch_sizes:
        settings = StepSettings(batch_size=size, class_weight=np.ones(_CLASSES, np.float32))
        trainer = Trainer(Steps(strategy, built, optimizer, settings), make_batches=_none, seed=1)
        try:
            rates[size] = trainer.step_rate(seconds)
        except tf.errors.ResourceExhaustedError as error:
            if not rates:
                raise MachineShort(
                    f"a batch of {size} does not fit into memory", todo="try --batch-size 8"
                ) from error
            break
    return rates


def _none(*_: object) -> None:
    """Nothing is read: the batch is at hand."""
