"""Training of the last layer only: features of the frozen network, computed once and kept beside the run.

An epoch of the last layer takes as long as one of the whole network, if the network is computed in each step. So the
features of every patch are computed before the first step, as `FOLDER/DIGEST/SUBSET-COPY.npy`, float32 (N, D) in the
order of the table. With N copies of the training patches, epoch E has copy E modulo N; the first one is not augmented.
The folder may be deleted at any time: a resumed training computes again what is lost or differs from its checksum.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.batches import PatchBatches
from histopipe.dataset.sampling import BatchSampler, Field, Order
from histopipe.dataset.selection import SampleTable
from histopipe.dataset.tf_data import BatchFeed
from histopipe.dataset.transforms import augment, sample_seeds, to_uint8
from histopipe.errors import DamagedStore, UsageError
from histopipe.system.files import atomic_write, file_sha256, free_bytes, read_json, write_json
from histopipe.system.forecast import spelled
from histopipe.system.output import default_progress, message
from histopipe.tasks.choices import Subset
from histopipe.training.models import PatchModel
from histopipe.training.train_step import StepSettings, TrainStep

FOLDER = "head-features"
_CHECKSUMS = "checksums.json"
"""SHA-256 of each file of features."""
_MOST_BYTES = 100e9
"""Most bytes of the features of a run."""
_NOTICE_SECONDS, _LONG_SECONDS = 60.0, 600.0
"""Time after which a training says how long it takes, and shortest training that does."""


class FeatureBatches(BatchSampler):
    """Batches of patches, with (B, D) float32 features in the place of "image". Patches that were skipped have weight 0.

    `copies` are (N, D) features of the samples of the table, in its order; NaN for a patch that cannot be read.
    """

    parallel_calls = 2
    read_ahead = 0

    def __init__(self, patches: PatchBatches, copies: Sequence[NDArray[np.float32]]) -> None:
        super().__init__(
            patches.table,
            batch_size=patches.batch_size,
            order=patches.order,
            replicas=patches.replicas,
            by_slide=patches.by_slide,
        )
        self.fields = (Field("image", np.float32, copies[0].shape[1:]), *patches.fields[1:])
        self._copies = copies
        keys = _keys(patches.table)
        self._order = np.argsort(keys)
        self._sorted = keys[self._order]
        self.skipped = dict.fromkeys(keys[np.isnan(copies[0][:, 0])].tolist(), "damaged")

    def load(self, step: int, replica: int = 0) -> dict[str, NDArray[Any]]:
        """Load a part of a step; see `BatchSampler`."""
        located, weights = self.locate(step, replica)
        rows = self._order[np.searchsorted(self._sorted, located.keys)]
        copy = step // self.steps_per_epoch % len(self._copies)
        features = self._copies[copy][rows]
        lost = np.isnan(features[:, 0])
        features[lost], weights[lost] = 0, 0
        return {
            "image": features,
            "label": located.labels,
            "weight": weights,
            "key": located.keys,
            **{name: located.values(values) for name, values in self.by_slide.items()},
        }


class HeadStep(TrainStep):
    """The training step of the last layer of a patch model, on features. `whole` is the model that is saved."""

    whole: PatchModel

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: PatchModel,
        optimizer: keras.Optimizer,
        settings: StepSettings,
    ) -> None:
        super().__init__(strategy, cast(PatchModel, model.head), optimizer, settings)
        self.whole = model

    def inputs(self, part: Mapping[str, tf.Tensor], seeds: tf.Tensor | None = None) -> tf.Tensor:
        """Return the features of a batch."""
        return part["image"]


def with_features(
    batches: Mapping[Subset, PatchBatches],
    step: HeadStep,
    folder: Path,
    *,
    copies: int,
    content: Any,
) -> dict[Subset, FeatureBatches]:
    """Return the batches of all subsets with features, which are computed unless the folder of the run has them.

    `content` describes what they depend on, apart from the choice of the patches and the augmentations.

    Raises:
        UsageError: the features would take more space than there is.
        DamagedStore: a patch cannot be read.
    """
    digest = hashlib.sha256(pickle.dumps((content, step.settings.augmentations)))
    for each in batches.values():
        digest.update(_keys(each.table).tobytes())
    cache = folder / FOLDER / digest.hexdigest()[:16]
    for other in (folder / FOLDER).glob("*"):
        if other != cache:
            shutil.rmtree(other)
    names = {
        subset: [f"{subset}-{copy}.npy" for copy in range(copies if subset == "train" else 1)]
        for subset in batches
    }
    width = step.model.training.inputs[0].shape[-1]
    size = 4 * width * sum(len(batches[subset].table) * len(names[subset]) for subset in names)
    if size > min(_MOST_BYTES, free_bytes(folder)):
        raise UsageError(
            f"--head-copies {copies}",
            found=f"{size / 1e9:.1f} GB of features, {free_bytes(folder) / 1e9:.1f} GB free",
            expected=f"at most {_MOST_BYTES / 1e9:g} GB",
            todo="use fewer copies, or 0, which computes the network in each step",
        )
    cache.mkdir(parents=True, exist_ok=True)
    checksums = _checksums(cache)
    missing = [
        (subset, copy)
        for subset in names
        for copy, name in enumerate(names[subset])
        if name not in checksums or not _is_intact(cache / name, checksums[name])
    ]
    total = sum(len(batches[subset].table) for subset, _ in missing)
    with default_progress().bar("features of the network", unit="patches", total=total) as bar:
        for subset, copy in missing:
            path = cache / names[subset][copy]
            values = np.empty((len(batches[subset].table), width), np.float32)
            first = 0
            for part in _compute(batches[subset], step, copy):
                values[first : first + len(part)] = part
                first += len(part)
                bar.advance(len(part))
            with atomic_write(path) as file:
                np.save(file, values)
            checksums[path.name] = file_sha256(path)
            write_json(cache / _CHECKSUMS, checksums)
    return {
        subset: FeatureBatches(
            each, [np.load(cache / name, mmap_mode="r") for name in names[subset]]
        )
        for subset, each in batches.items()
    }


class HeadNotice(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Says once, after the first minute of a training, how long it takes, and how long the last layer alone would take.

    `batches` are those of all subsets before the training; the time of the network alone is measured on one of them.
    """

    def __init__(
        self, batches: Mapping[Subset, PatchBatches], step: TrainStep, epochs: int
    ) -> None:
        super().__init__()
        self._batches, self._step, self._epochs = batches, step, epochs
        self._began, self._steps = 0.0, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count steps from the second one on: the first one is slower."""
        now = time.monotonic()
        self._began = self._began or now
        if now - self._began < _NOTICE_SECONDS:
            self._steps += 1
        elif self._steps:
            of_step, self._steps = (now - self._began) / self._steps, 0
            train, of_patch = self._batches["train"], self._patch_seconds()
            rows = {subset: len(each.table) for subset, each in self._batches.items()}
            validating = rows.get("validation", 0) * of_patch
            whole = self._epochs * (train.steps_per_epoch * of_step + validating)
            head = sum(rows.values()) * of_patch
            if whole > _LONG_SECONDS and whole > 4 * head:
                message(
                    f"on this CPU, {self._epochs} epochs take about {spelled(whole)}; --trainable head takes "
                    f"about {spelled(head)}: docs/how-to/without-gpu.md"
                )

    def _patch_seconds(self) -> float:
        """Return the seconds of the network alone for one patch."""
        part = self._batches["train"].load(0)
        batch = {name: tf.constant(part[name]) for name in ("image", "key")}
        began = time.monotonic()
        self._step.whole.serving(self._step.inputs(batch), training=False)
        return (time.monotonic() - began) / len(part["key"])


def _compute(batches: PatchBatches, step: HeadStep, copy: int) -> Iterator[NDArray[np.float32]]:
    """Yield (B, D) features of the samples of a table, in its order; NaN for damaged patches. Copy 0 is not augmented."""
    network = cast(keras.Model, step.whole.features)
    ordered = PatchBatches(
        batches.stores,
        batches.table,
        batch_size=batches.batch_size,
        order=Order(len(batches.table)),
        on_error=batches.on_error,
    )

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # tensorflow has no types
    def features(batch: Any) -> tf.Tensor:
        images = step.normalized(batch)
        if copy:
            seeds = sample_seeds(batch["key"], tf.constant(copy, tf.int64))
            images = augment(images, seeds, step.settings.augmentations)
        return network(to_uint8(images), training=False)

    feed = BatchFeed(ordered)
    try:
        for number, batch in enumerate(feed.dataset(0, ordered.steps_per_epoch)):
            values = np.array(features(batch), np.float32)
            values[batch["weight"].numpy() == 0] = np.nan
            yield values[: len(ordered.table) - number * ordered.batch_size]
    except tf.errors.OpError:
        raise feed.failure or DamagedStore("patches cannot be read") from None
    finally:
        feed.settle()


def _keys(table: SampleTable) -> NDArray[np.int64]:
    return table.locate(np.arange(len(table))).keys


def _checksums(cache: Path) -> dict[str, str]:
    try:
        return dict(read_json(cache / _CHECKSUMS))
    except (OSError, ValueError, TypeError):  # lost, or torn
        return {}


def _is_intact(path: Path, checksum: str) -> bool:
    try:
        return file_sha256(path) == checksum
    except OSError:
        return False
