"""Compare the speed of histopipe's training loop with Keras' `fit`, on one device with the same model and batches.

    python tools/bench_train.py STORE [--model small-cnn] [--batch-size 32] [--steps 60] [--rounds 5]

Both train on the same batches alternately, round by round. The result is the median ratio of steps per second.
`fit` does the same work per step: flips per sample, class weights per row, and accuracy. XLA is off in both, or on in
both with --xla.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.sampling import make_order
from histopipe.dataset.selection import SampleTable, select
from histopipe.dataset.tf_data import BatchFeed
from histopipe.dataset.transforms import augment, epoch_seed, sample_seeds
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.store.store import Store
from histopipe.training.devices import make_strategy
from histopipe.training.epochs import EpochLoop
from histopipe.training.models import build_model, make_optimizer
from histopipe.training.objective import ClassObjective
from histopipe.training.outputs import TrainState
from histopipe.training.train_step import StepSettings, TrainStep

SEED = 1


class Ours:
    """histopipe's loop, one epoch per call."""

    def __init__(self, store: Store, options: argparse.Namespace) -> None:
        config = PatchTrainConfig(model=options.model, batch_size=options.batch_size)
        strategy = make_strategy("auto")
        with strategy.scope():
            model = build_model(
                config.model,
                patch_size=store.patch_size,
                objective=ClassObjective(2),
                dropout=config.dropout,
            )
            optimizer = make_optimizer(config, 1)
        settings = StepSettings(
            batch_size=config.batch_size,
            objective=ClassObjective(2),
            class_weight=np.ones(2, np.float32),
            augmentations=("flips",),
            xla=options.xla,
        )
        self._loop = EpochLoop(TrainStep(strategy, model, optimizer, settings), seed=SEED)
        table = SampleTable(select([store]))
        self._batches = PatchBatches(
            [store],
            table,
            batch_size=config.batch_size,
            order=make_order(table, seed=SEED),
            replicas=strategy.num_replicas_in_sync,
        )
        self._batches.steps_per_epoch = min(options.steps, self._batches.steps_per_epoch)
        self.steps = self._batches.steps_per_epoch

    def epoch(self, number: int) -> None:
        """Train on the steps of one epoch."""
        self._loop.train_epoch(self._batches, TrainState(epoch=number), "")


class Fit:
    """Keras' `fit` on the same batches."""

    def __init__(self, store: Store, options: argparse.Namespace) -> None:
        model = build_model(
            options.model,
            patch_size=store.patch_size,
            objective=ClassObjective(2),
            dropout=PatchTrainConfig().dropout,
        )
        self._model = model.training
        self._model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
            jit_compile=options.xla,
        )
        table = SampleTable(select([store]))
        order = make_order(table, seed=SEED)
        self._batches = PatchBatches([store], table, batch_size=options.batch_size, order=order)
        self.steps = min(options.steps, self._batches.steps_per_epoch)

    def epoch(self, number: int) -> None:
        """Train on the steps of one epoch."""
        source = BatchFeed(self._batches)
        first = number * self._batches.steps_per_epoch
        seed = epoch_seed(SEED, number)

        def fields(batch: dict[str, tf.Tensor]) -> Any:
            seeds = sample_seeds(batch["key"], seed)
            return (
                (augment(batch["image"], seeds, ["flips"]), seeds),
                batch["label"],
                batch["weight"],
            )

        dataset = source.dataset(first, first + self.steps).map(fields)
        self._model.fit(dataset, verbose=0)
        source.settle()


def main() -> None:
    """Run the rounds and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--model", default="small-cnn")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--xla", action="store_true")
    options = parser.parse_args()
    with Store(options.store) as store:
        ours, fit = Ours(store, options), Fit(store, options)
        rates: dict[str, list[float]] = {"ours": [], "fit": []}
        for number in range(options.rounds + 1):
            for name, loop in (("ours", ours), ("fit", fit)):
                begun = time.perf_counter()
                loop.epoch(number)
                if number:  # the first round traces
                    rates[name].append(loop.steps / (time.perf_counter() - begun))
    ratios = [a / b for a, b in zip(rates["ours"], rates["fit"], strict=True)]
    for name, values in rates.items():
        print(f"{name:<5} {statistics.median(values):8.2f} steps/s")
    print(
        f"ratio {statistics.median(ratios):8.3f}  ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"{options.model}, {ours.steps} steps of {options.batch_size}, {options.rounds} rounds"
    )
    os._exit(0)


if __name__ == "__main__":
    main()
