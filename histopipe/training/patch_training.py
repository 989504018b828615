"""The data and the network of a training on patches; and features of a frozen network, to train the last layer on.

An epoch of the last layer takes as long as one of the whole network, if the network is computed in each step. So the
features of all patches are computed before the first step. With N copies of the training patches, epoch E has copy E modulo
N; the first one is not augmented.

The folder `.head-features` next to the run serves all runs there with the same network and patches: folds, trials, other
settings. For each copy, `COPY.f32` has a row per patch of the stores, and `COPY.crc` its CRC-32; 0 where nothing has been
computed. Both are sparse. So a killed process leaves nothing wrong, and several may write at once: their rows are the same.
The folder may be deleted at any time: what is lost, or does not match its CRC, is computed again.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.dataset.batches import PatchBatches, read_patch_features
from histopipe.dataset.sampling import BatchSampler, Field
from histopipe.dataset.selection import SampleLocations, unpack_keys
from histopipe.dataset.transforms import augment, sample_seeds, stain_normalizer, to_uint8
from histopipe.errors import UsageError
from histopipe.features.feature_sets import read_encoder
from histopipe.pretrained.encoders import named_preset
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import Splits, patches_crc
from histopipe.store.store import Store
from histopipe.system.files import free_bytes
from histopipe.system.forecast import spelled
from histopipe.system.output import default_progress, message
from histopipe.tasks.choices import Subset
from histopipe.training.models import (
    PatchModel,
    build_head,
    build_model,
    frozen_digest,
    make_optimizer,
)
from histopipe.training.train_step import StepSettings, TrainStep
from histopipe.training.training_setup import TrainingSetup

RowsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]
FOLDER = ".head-features"
_MOST_BYTES = 100e9
"""Most bytes of the folder. The features that were used least recently are removed first."""
_VERSION = 1
"""Changes with what is computed from a network and a patch."""
_ROWS = 64
"""Patches that are computed at once."""
_NOTICE_SECONDS, _LONG_SECONDS = 60.0, 600.0
"""Time after which a training shows how long it takes, and shortest training that does."""


class FeatureBatches(BatchSampler):
    """Batches of patches, with (B, D) float32 features in the place of "image". Patches that were skipped have weight 0.

    `copies` are (N, D) features of all patches of the stores; `rows` returns their row from (B,) keys. Features of a patch
    that cannot be read are NaN.
    """

    parallel_calls = 2
    read_ahead = 0

    def __init__(
        self, patches: PatchBatches, copies: Sequence[NDArray[np.float32]], rows: RowsOf
    ) -> None:
        super().__init__(
            patches.table,
            batch_size=patches.batch_size,
            order=patches.order,
            replicas=patches.replicas,
            by_slide=patches.by_slide,
        )
        self.fields = (Field("image", np.float32, copies[0].shape[1:]), *patches.fields[1:])
        self._copies, self._rows = copies, rows
        keys = patches.table.keys
        self.skipped = dict.fromkeys(keys[np.isnan(self.features(keys)[:, 0])].tolist(), "damaged")

    def features(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return (N, D) features of patches, not augmented; NaN for what cannot be read."""
        return self._copies[0][self._rows(keys)]

    def load(self, step: int, replica: int = 0) -> dict[str, NDArray[Any]]:
        """Load a part of a step; see `BatchSampler`."""
        located, weights = self.locate(step, replica)
        copy = step // self.steps_per_epoch % len(self._copies)
        features = self._copies[copy][self._rows(located.keys)]
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

    @tf.function(autograph=False, reduce_retracing=True)  # type: ignore[untyped-decorator]  # tensorflow has no types
    def features(self, part: Mapping[str, tf.Tensor], copy: int) -> tf.Tensor:
        """Return (B, D) features of the images of a batch. Copy 0 is not augmented."""
        images = self.normalized(part)
        if copy:
            seeds = sample_seeds(part["key"], tf.constant(copy, tf.int64))
            images = augment(images, seeds, self.settings.augmentations)
        return cast(keras.Model, self.whole.features)(to_uint8(images), training=False)

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
    """Return the batches of all subsets with features, which are computed where the folder next to the runs has none.

    `content` describes what they depend on, apart from the patches and the augmentations.

    Raises:
        UsageError: the features would take more space than there is.
        DamagedStore: a patch cannot be read.
    """
    patches = next(iter(batches.values()))
    slides = [
        (store << 24 | number, record.planned, patches_crc(opened, number))
        for store, opened in enumerate(patches.stores)
        for number, record in sorted(opened.complete.items())
    ]
    places, counts, _ = (np.array(column, np.int64) for column in zip(*slides, strict=True))
    starts, width = np.cumsum(counts) - counts, step.model.training.inputs[0].shape[-1]

    def rows_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = starts[np.searchsorted(places, keys >> 32)] + (keys & 0xFFFFFFFF)
        return rows

    digest = hashlib.sha256(pickle.dumps((_VERSION, content, slides))).hexdigest()[:16]
    shared = folder.parent / FOLDER
    # It may be that of a colleague.
    is_writable = os.access(shared if shared.exists() else folder.parent, os.W_OK)
    cache = (shared if is_writable else folder / FOLDER) / digest
    size = (
        4
        * width
        * sum(
            len(each.table) * (copies if subset == "train" else 1)
            for subset, each in batches.items()
        )
    )
    _make_room(cache, size, copies)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(closing(_Copy(cache, number, step, int(counts.sum()), width)))
            for number in range(copies)
        ]
        missing = [
            (copy, each, keys)
            for subset, each in batches.items()
            for copy in opened[: copies if subset == "train" else 1]
            if len(keys := copy.missing(each.table.keys, rows_of))
        ]
        total = sum(len(keys) for *_, keys in missing)
        bar = stack.enter_context(
            default_progress().bar("features of the network", unit="patches", total=total)
        )
        for copy, each, keys in missing:
            for some in np.split(keys, range(_ROWS, len(keys), _ROWS)):
                copy.write(rows_of(some), _computed(each, step, some, copy.number))
                bar.advance(len(some))
    return {
        subset: FeatureBatches(
            each, [c.features for c in opened[: copies if subset == "train" else 1]], rows_of
        )
        for subset, each in batches.items()
    }


class _Copy:
    """The features of one copy of all patches, and their CRCs. Both files are sparse."""

    def __init__(self, cache: Path, number: int, step: HeadStep, rows: int, width: int) -> None:
        self.number = number
        name = "+".join((str(number), *step.settings.augmentations)) if number else "0"
        # They stay open: another process may remove the folder.
        self._files = [
            os.fdopen(os.open(cache / f"{name}.{kind}", os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            for kind in ("f32", "crc")
        ]
        self.features: NDArray[np.float32] = _sparse(self._files[0], np.float32, (rows, width))
        self._crcs = _sparse(self._files[1], np.uint32, (rows,))

    def close(self) -> None:
        """Close the files. The features can still be read."""
        for file in self._files:
            file.close()

    def missing(self, keys: NDArray[np.int64], rows_of: RowsOf) -> NDArray[np.int64]:
        """Return the sorted keys of patches without intact features."""
        keys = np.sort(keys)
        rows = rows_of(keys)
        crcs = zip(rows.tolist(), self._crcs[rows].tolist(), strict=True)
        intact = [crc != 0 and crc == _crc(self.features[row]) for row, crc in crcs]
        return np.asarray(keys[~np.array(intact)])

    def write(self, rows: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Store features, and then their CRCs. Damaged patches have none, so that another run reads them again."""
        crcs = np.array([0 if np.isnan(row[0]) else _crc(row) for row in values], np.uint32)
        # Not through the mapped memory: on a full disk, the kernel would kill this process.
        for file, each in zip(self._files, (values, crcs), strict=True):
            for row, value in zip(rows.tolist(), each, strict=True):
                file.seek(row * value.nbytes)
                file.write(value.tobytes())
            file.flush()


def _sparse(file: BinaryIO, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if os.fstat(file.fileno()).st_size != size:
        file.truncate(size)  # longer by zeros
    return np.memmap(file, dtype, "r", shape=shape)


def _crc(row: NDArray[np.float32]) -> int:
    return zlib.crc32(row.tobytes()) or 1  # 0 is for what has not been computed


def _computed(
    batches: PatchBatches, step: HeadStep, keys: NDArray[np.int64], copy: int
) -> NDArray[np.float32]:
    """Return the (B, D) features of some patches; NaN for damaged ones.

    Always of so many patches at once: with another number, sums are rounded in another way, and a training that computes
    lost features again would not be the same.
    """
    located = SampleLocations(*unpack_keys(np.resize(keys, _ROWS)), np.zeros(_ROWS, np.int32))
    batch = batches.read(located, np.ones(_ROWS, np.float32))
    part = {"image": tf.constant(batch["image"].copy()), "key": tf.constant(batch["key"])}
    values = np.array(step.features(part, copy), np.float32)
    values[batch["weight"] == 0] = np.nan
    return values[: len(keys)]


def _make_room(cache: Path, size: int, copies: int) -> None:
    """Create a folder for features of a size, and remove those of other networks if there is no room for all."""
    cache.mkdir(parents=True, exist_ok=True)
    os.utime(cache)  # it is the one that was used last
    used = {
        path: sum(512 * file.stat().st_blocks for file in path.iterdir())
        for path in sorted(cache.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        if path.is_dir()
    }
    needed = size - used.pop(cache)
    # What cannot fit in any case removes nothing.
    if size > _MOST_BYTES or needed > free_bytes(cache) + sum(used.values()):
        raise UsageError(
            f"--head-copies {copies}",
            found=f"{size / 1e9:.1f} GB of features, {free_bytes(cache) / 1e9:.1f} GB free",
            expected=f"at most {_MOST_BYTES / 1e9:g} GB",
            todo="use fewer copies, or 0, which computes the network in each step",
        )
    while used and (size + sum(used.values()) > _MOST_BYTES or needed > free_bytes(cache)):
        oldest = next(iter(used))
        shutil.rmtree(oldest, ignore_errors=True)  # a process that uses it keeps its files
        del used[oldest]


class HeadNotice(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Shows once, after the first minute of a training, how long it takes, and how long the last layer alone would take.

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


class PatchTraining(TrainingSetup):
    """Training on patches."""

    units = "complete slides"
    _config: PatchTrainConfig
    _sources: Sequence[Store]

    def __init__(
        self,
        config: PatchTrainConfig,
        stores: Sequence[Store],
        splits: Splits,
        slides: Sequence[SlideEntry] = (),
    ) -> None:
        super().__init__(config, stores, splits, slides, max_per_slide=config.max_per_slide)
        mpps = [r.patch_mpp for store in stores for r in store.complete.values()]
        of = Path(config.features or "")
        self._features = (
            read_patch_features(of, stores, self._tables, config.on_error)
            if config.features
            else None
        )
        if self._features is not None:
            # What a resumed training must have, too.
            backbone = {"features_crc32": zlib.crc32(self._features[1].data)}
            self.description |= {"encoders": [read_encoder(of)], "backbone": backbone}
        preset = named_preset(config.model)
        if preset is not None:
            preset.check_patches(stores[0].patch_size, mpps, allowed=config.allow_mismatch)
            if preset.licence:
                message(f"the trained model contains weights of {preset.title}: {preset.licence}")
        if config.labels_from == "annotation":
            self.description["annotations"] = {
                r.id: r.annotations
                for store in stores
                for r in store.complete.values()
                if r.patch_labels
            }
        scales = [mpp for mpp in mpps if mpp]
        self.description |= {
            "spec": dict(stores[0].spec),
            "patch_mpp": float(np.median(scales)) if scales else None,
        }

    def batches(self, subset: Subset, replicas: int) -> PatchBatches:
        """Return the batches of a subset; see `TrainingSetup`."""
        config = self._config
        return PatchBatches(
            self._sources,
            self._tables[subset],
            batch_size=config.batch_size,
            replicas=replicas,
            order=self._order(subset, shuffle_block=config.shuffle_block or None),
            on_error=config.on_error,
            by_slide=self._by_slide,
        )

    def train_step(self, strategy: tf.distribute.Strategy, steps_per_epoch: int) -> TrainStep:
        """Return the training step; see `TrainingSetup`."""
        config = self._config
        with strategy.scope():
            model = (
                build_head(
                    self._features[1].shape[1], objective=self.objective, dropout=config.dropout
                )
                if self._features
                else self._build(
                    config.model,
                    patch_size=self._sources[0].patch_size,
                    objective=self.objective,
                    dropout=config.dropout,
                    weights=config.used_weights,
                    precision=config.precision,
                    trainable=config.trainable,
                    layer_decay=config.layer_decay,
                )
            )
            optimizer = make_optimizer(config, steps_per_epoch)
        if model.description:
            self.description["backbone"] = dict(model.description)
        kind = HeadStep if config.head_copies and model.head is not None else TrainStep
        return kind(
            strategy,
            model,
            optimizer,
            self._step_settings(
                normalize=None
                if config.stain_norm == "none"
                else stain_normalizer(self._sources, config.stain_norm),
                augmentations=config.augmentations,
                xla=config.xla,
                skip_bias_gradients=config.skip_bias_gradients,
            ),
        )

    def _build(self, name: str, **options: Any) -> PatchModel:
        """Build the network; see `build_model`."""
        return build_model(name, **options)

    def notices(
        self, batches: dict[Subset, Any], step: TrainStep
    ) -> list[keras.callbacks.Callback]:
        """Name the training of the last layer where it is far faster; see `TrainingSetup`."""
        config = self._config
        is_slow = not tf.config.get_visible_devices("GPU") and config.used_weights != "none"
        return (
            [HeadNotice(batches, step, config.epochs)]
            if is_slow and config.trainable != "head"
            else []
        )

    def prepared(
        self, batches: dict[Subset, Any], step: TrainStep, folder: Path | None
    ) -> dict[Subset, Any]:
        """With a frozen network, return batches of its features; see `TrainingSetup`."""
        config = self._config
        if not isinstance(step, HeadStep):
            return batches
        if self._features is not None:
            keys, values = self._features

            def rows_of(chosen: NDArray[np.int64]) -> NDArray[np.int64]:
                return np.searchsorted(keys, chosen)

            return {name: FeatureBatches(each, [values], rows_of) for name, each in batches.items()}
        if folder is None:  # of another worker of the training
            self._scratch = TemporaryDirectory()
            folder = Path(self._scratch.name) / "run"
        stains = (
            [store.stains() for store in self._sources] if config.stain_norm != "none" else None
        )
        content = (
            frozen_digest(step.whole.training, self.description),
            config.precision,
            config.stain_norm,
            stains,
        )
        copies = config.head_copies if config.augmentations else 1  # else all are equal
        return dict(with_features(batches, step, folder, copies=copies, content=content))
