"""Train models on some numbers of replicas, or as one of several workers, and write losses per step and weights.

Usage: invariant.py STORE OUT.npz CASE,... REPLICAS...    (REPLICAS `workers`: the workers of TF_CONFIG)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.sampling import make_order
from histopipe.dataset.selection import SampleTable, select
from histopipe.runs.supervision import Cluster
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.store.store import Store
from histopipe.training.devices import find_cluster, make_strategy
from histopipe.training.epochs import EpochLoop
from histopipe.training.models import (
    PatchModel,
    SampleDropout,
    build_model,
    dtype_policy,
    make_optimizer,
)
from histopipe.training.objective import ClassObjective
from histopipe.training.outputs import TrainState, step_losses
from histopipe.training.train_step import StepSettings, TrainStep

BATCH, STEPS = 14, 24
"""The batch size is not divisible by 4. With 101 patches, the last step of an epoch has 3."""

ENCODERS = Path(__file__).parents[1] / "encoders"
TINY = {
    "model": str(ENCODERS / "tiny.toml"),
    "weights": str(ENCODERS / "timm-registers.safetensors"),
}
CASES: dict[str, dict[str, Any]] = {
    "adagrad-clipped": {"optimizer": "adagrad", "learning_rate": 0.01, "clip_norm": 0.05},
    "adamw-accumulated": {"optimizer": "adamw", "accumulate": 3, "label_smoothing": 0.1},
    "batch-norm-cosine": {
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "schedule": "cosine",
        "warmup_steps": 9,
        "model": "batch-norm-1",
    },
    "last-block": {
        **TINY,
        "optimizer": "adamw",
        "trainable": "last:1",
        "layer_decay": 0.5,
        "learning_rate": 3e-3,
    },
    "low-rank": {**TINY, "optimizer": "adamw", "trainable": "lora:2", "learning_rate": 0.02},
    "deep-float64": {
        "optimizer": "adamw",
        "learning_rate": 1e-4,
        "model": "batch-norm-12",
        "precision": "float64",
    },
}


def batch_norm_model(side: int, dropout: float, depth: int) -> PatchModel:
    """A network of `depth` convolutions, each with batch normalization."""
    image = keras.Input((side, side, 3), dtype="uint8")
    seed = keras.Input((), dtype="int64")
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(image)
    for layer in range(depth):
        size, strides = (5, 4) if layer == 0 else (3, 1)
        x = keras.layers.Conv2D(16, size, strides, "same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(synchronized=True)(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    head, softmax = keras.layers.Dense(2), keras.layers.Softmax()
    return PatchModel(
        keras.Model([image, seed], head(SampleDropout(dropout)(x, seed))),
        keras.Model(image, softmax(head(x))),
    )


def train(store: Store, strategy: Any, cluster: Cluster | None, case: str) -> dict[str, Any]:
    config = PatchTrainConfig(
        batch_size=BATCH, dropout=0.3, augment=("flips", "colour"), epochs=7, **CASES[case]
    )
    table = SampleTable(select([store]))
    keras.utils.set_random_seed(config.seed)
    with strategy.scope():
        if config.model.startswith("batch-norm"):
            depth = int(config.model.removeprefix("batch-norm-"))
            with dtype_policy(config.precision):
                model = batch_norm_model(store.patch_size, config.dropout, depth)
        else:
            model = build_model(
                config.model,
                patch_size=store.patch_size,
                objective=ClassObjective(2),
                dropout=config.dropout,
                precision=config.precision,
                weights=config.used_weights,
                trainable=config.trainable,
                layer_decay=config.layer_decay,
            )
        optimizer = make_optimizer(config, 8)
    settings = StepSettings(
        batch_size=BATCH,
        objective=ClassObjective(2),
        class_weight=np.array([0.7, 1.3], np.float32),
        augmentations=config.augmentations,
        clip_norm=config.clip_norm,
        label_smoothing=config.label_smoothing,
    )
    loop = EpochLoop(
        TrainStep(strategy, model, optimizer, settings),
        seed=config.seed,
        cluster=cluster,
        accumulate=config.accumulate,
    )
    batches = PatchBatches(
        [store],
        table,
        batch_size=BATCH,
        order=make_order(table, seed=config.seed),
        replicas=strategy.num_replicas_in_sync,
    )
    losses: list[float] = []
    for epoch in range(-(-STEPS // batches.steps_per_epoch)):
        state = TrainState(epoch=epoch)
        loop.train_epoch(batches, state, "")
        losses += step_losses(state.values).tolist()
    weights = [np.asarray(v.value) for v in model.training.variables]
    return {"losses": np.array(losses)} | {f"w{i:03d}": w for i, w in enumerate(weights)}


def main() -> None:
    path, out, cases, *replicas = sys.argv[1:]
    results: dict[str, Any] = {}
    with Store(Path(path)) as store:
        if replicas == ["workers"]:
            cluster = find_cluster()
            strategies = {"workers": make_strategy("cpu", cluster, timeout=60)}
        else:
            cluster = None
            make_strategy(f"cpu:{max(map(int, replicas))}")
            devices = {count: [f"/CPU:{i}" for i in range(int(count))] for count in replicas}
            strategies = {
                count: tf.distribute.MirroredStrategy(names)
                if len(names) > 1
                else tf.distribute.OneDeviceStrategy(names[0])
                for count, names in devices.items()
            }
        for case in cases.split(","):
            for name, strategy in strategies.items():
                outcome = train(store, strategy, cluster, case)
                results |= {f"{case}/{name}/{key}": value for key, value in outcome.items()}
    np.savez(out, **results)
    os._exit(0)


if __name__ == "__main__":
    main()
