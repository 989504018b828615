"""The rate of training steps on this machine's devices, without reading data."""

from __future__ import annotations

import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from histopipe.dataset.batch_sampler import replica_rows
from histopipe.errors import MachineShort
from histopipe.store.store import Store
from histopipe.training.devices import make_strategy
from histopipe.training.epoch_loop import one_per_replica
from histopipe.training.models import build_model
from histopipe.training.train_step import StepSettings, TrainStep

_CLASSES = 2


def measure_device(
    stores: Sequence[Store], model: str, batch_sizes: Sequence[int], devices: str, seconds: float
) -> dict[int, float]:
    """Measure patches per second of training steps on one batch that stays in memory, by batch size.

    `seconds` is for each size. Sizes rise; those from the first that does not fit into memory on are left out.

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
        try:
            rates[size] = _step_rate(TrainStep(strategy, built, optimizer, settings), seconds)
        except tf.errors.ResourceExhaustedError as error:
            if not rates:
                raise MachineShort(
                    f"a batch of {size} does not fit into memory", todo="try --batch-size 8"
                ) from error
            break
    return rates


def _step_rate(train_step: TrainStep, seconds: float) -> float:
    """Return patches per second. The weights change."""
    strategy, size = train_step.strategy, train_step.settings.batch_size
    side = train_step.model.serving.input_shape[1]
    replicas = strategy.num_replicas_in_sync
    sizes = [len(replica_rows(size, replicas, replica)) for replica in range(replicas)]
    parts = [
        {
            "image": tf.zeros((rows, side, side, 3), tf.uint8),
            "label": tf.zeros((rows,), tf.int32),
            "weight": tf.ones((rows,)),
            "key": tf.range(rows, dtype=tf.int64),
        }
        for rows in sizes
    ]
    batch, number = one_per_replica(strategy, parts, 0), tf.constant(0, tf.int64)
    most = max(sizes)

    def step() -> None:
        gradients, values = train_step.gradients(batch, number, most, most)
        train_step.apply(gradients, tf.zeros(2))
        # Fetching a result waits for it: devices compute asynchronously.
        np.asarray(values[0][0])

    step()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        step()
        count += size
    return count / (time.perf_counter() - begun)
