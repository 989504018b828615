"""Every setting of a training, as one frozen value that can be written down and run again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, get_args, get_origin, get_type_hints

from histopipe.dataset.options import (
    AUGMENTATIONS,
    Augmentation,
    Balance,
    LabelsFrom,
    OnError,
    SplitBy,
    StainNorm,
)
from histopipe.dataset.patch_filter import PatchFilter
from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import JudgeSettings
from histopipe.evaluation.thresholds import check_rule
from histopipe.features import BagOf
from histopipe.runs.setting_checks import fits, flag, like, one_of

Optimizer = Literal["adam", "adamw", "adagrad", "sgd"]
ClassWeights = Literal["none", "balanced"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16", "float64"]
Schedule = Literal["constant", "cosine"]
Communication = Literal["auto", "ring", "nccl"]
Pooling = Literal["gated", "attention", "mean", "max"]


DEVICES = re.compile(r"auto|cpu(:(?P<cpus>[1-9]\d*))?|gpu(:(?P<gpus>\d+(,\d+)*))?")
"""What `--devices` may be."""
_LEAST = {
    "epochs": 1,
    "batch_size": 1,
    "accumulate": 1,
    "patience": 0,
    "top_k": 1,
    "resamples": 0,
    "seed": 0,
    "max_per_slide": 0,
    "shuffle_block": 0,
    "warmup_steps": 0,
}
_MOST_SEED = (1 << 32) - 1
_ABOVE_0 = ("learning_rate", "region_um", "save_minutes", "worker_timeout")
PATCHES_ONLY = (
    "stores",
    "model",
    "weights",
    "labels_from",
    "min_tissue",
    "min_focus",
    "exclude_pen",
    "exclude_dark",
    "region_um",
    "augment",
    "stain_norm",
    "shuffle_block",
    "xla",
)
"""Settings that a training on bags has no use for."""
BAGS_ONLY = ("bag", "pooling")
BAG_DEFAULTS: Mapping[str, Any] = {
    "batch_size": 1,
    "learning_rate": 2e-4,
    "augment": ("none",),
}
"""What a training on bags has where a training on patches has another default."""
_BELOW = {"dropout": 1.0, "label_smoothing": 1.0, "clip_norm": inf, "weight_decay": inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of one training.

    Attributes:
        stores: paths of the stores.
        labels: a labels file that replaces the recorded labels; None for those.
        allow_extra_rows: ignore rows of that file that name no slide.
        model: "small-cnn" or the name of a `keras.applications` model.
        weights: "none", "imagenet", or a weights file for the backbone.
        mil: a folder of feature files: learn of whole bags of them, by their labels, and not of patches.
        bag: what a bag is of: "slide" or "patient".
        pooling: how a bag's patches become one: "gated" or plain "attention", "mean" or "max".
        epochs, batch_size, seed: as everywhere; the batch is global, over all replicas, of patches or bags.
        labels_from: "annotation" learns the classes that are drawn on patches, "slide" those of their slides.
        min_tissue, min_focus, exclude_pen, exclude_dark: which patches are fit to be used, see `PatchFilter`.
        split_by, fractions, region_um: how patches are split into train, validation and test.
        splits: a splits.json to use instead of making one.
        allow_leaks: train although a patient or slide is on several sides.
        optimizer, learning_rate: of the optimizer.
        weight_decay: of the optimizer "adamw".
        schedule: of the learning rate: "cosine" lets it fall to 0 at the end of the last epoch.
        warmup_steps: steps in which a cosine rises to the learning rate first.
        clip_norm: gradients longer than this, all weights together, are shortened to it; 0 for never.
        label_smoothing: share of each training label that is spread over all classes.
        class_weights: "balanced" weighs each class by the inverse of its patches.
        dropout: share of features dropped before the last layer, 0 to 1.
        augment: "none", or of flips, crop, colour and stain those that training patches go through.
        stain_norm: give every slide the stain of one reference; the saved model then wants such patches.
        balance: draw classes, slides or patients equally often in training.
        max_per_slide: training patches of a slide, or bag, in an epoch, at most; 0 for all.
        shuffle_block: shuffle blocks of so many neighbours, for slow disks; 0 shuffles all patches.
        on_error: "skip" goes on without a patch that is damaged in the store.
        patience: epochs without a better validation AUC before stopping; 0 never stops.
        positive: the class that sensitivity, specificity and F1 are of, where there are two; the last one if not given.
        threshold: how the probability from which on something is positive is chosen on validation: "youden",
            "sensitivity:0.95", "specificity:0.95", or a probability.
        top_k: how many patches "top_k" aggregates to a slide or patient.
        resamples: of the patients, for intervals; 0 for none.
        accumulate: compute each step's gradients in so many pieces, which takes less memory.
        precision: Keras' dtype policy.
        xla: compile the network.
        save_minutes: the resume state is saved so often within an epoch, and after each.
        tensorboard: write logs for TensorBoard.
        devices: "auto", "cpu", "cpu:N", "gpu" or "gpu:0,1".
        communication: between workers on several machines.
        worker_timeout: seconds to wait for a worker; more than the slowest step and the slowest save take.
        log_device_placement: tell which device computes what.
        deterministic: bitwise repeatable operations, slower.

    Raises:
        UsageError: a value is out of range.
    """

    stores: tuple[str, ...] = ("patches.lmdb",)
    labels: str | None = None
    allow_extra_rows: bool = False
    model: str = "small-cnn"
    weights: str = "none"
    mil: str | None = None
    bag: BagOf = "slide"
    pooling: Pooling = "gated"
    epochs: int = 20
    batch_size: int = 64
    seed: int = 1
    labels_from: LabelsFrom = "slide"
    min_tissue: float = 0.0
    min_focus: float = 0.0
    exclude_pen: float = 1.0
    exclude_dark: float = 1.0
    split_by: SplitBy = "patient"
    fractions: tuple[float, ...] = (0.7, 0.15, 0.15)
    region_um: float = 250.0
    splits: str | None = None
    allow_leaks: bool = False
    optimizer: Optimizer = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.004
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    clip_norm: float = 0.0
    label_smoothing: float = 0.0
    class_weights: ClassWeights = "none"
    dropout: float = 0.15
    augment: tuple[str, ...] = ("flips",)
    stain_norm: StainNorm = "none"
    balance: Balance = "none"
    max_per_slide: int = 0
    shuffle_block: int = 0
    on_error: OnError = "raise"
    patience: int = 5
    positive: str | None = None
    threshold: str = "youden"
    top_k: int = 10
    resamples: int = 1000
    accumulate: int = 1
    precision: Precision = "float32"
    xla: bool = False
    save_minutes: float = 10.0
    tensorboard: bool = False
    devices: str = "auto"
    communication: Communication = "auto"
    worker_timeout: float = 600.0
    log_device_placement: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not fits(value, field.default) and value != field.default:
                raise UsageError(flag(field.name), found=repr(value), expected=like(field))
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                one_of(flag(name), getattr(self, name), get_args(kind))
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(flag(name), found=getattr(self, name), expected=f"{least} or more")
        if self.seed > _MOST_SEED:
            raise UsageError("--seed", found=self.seed, expected=f"at most {_MOST_SEED:,}")
        for name in _ABOVE_0:
            if not 0 < getattr(self, name) < inf:
                raise UsageError(flag(name), found=getattr(self, name), expected="more than 0")
        for name, most in _BELOW.items():
            if not 0 <= getattr(self, name) < most:
                raise UsageError(
                    flag(name), found=getattr(self, name), expected=f"from 0 to below {most:g}"
                )
        check_rule(self.threshold)
        self.patch_filter  # noqa: B018 - checks its own bounds
        for name in self.augment:
            one_of("--augment", name, ("none", *AUGMENTATIONS))
        self._check_together()

    def _check_together(self) -> None:
        if len(set(self.augment)) < len(self.augment) or (
            "none" in self.augment and len(self.augment) > 1
        ):
            raise UsageError(
                "--augment", found=",".join(self.augment),
                expected="none, or a list without doubles",
            )  # fmt: skip
        self._check_devices()
        self._check_bags()
        if self.warmup_steps and self.schedule == "constant":
            raise UsageError(
                "--warmup-steps", found="--schedule constant", expected="--schedule cosine"
            )
        if self.accumulate > self.batch_size:
            raise UsageError(
                "--accumulate", found=self.accumulate,
                expected=f"at most the {self.batch_size} patches of --batch-size",
            )  # fmt: skip
        if self.balance != "none" and self.shuffle_block:
            raise UsageError(
                f"--balance {self.balance} draws from all slides at once and --shuffle-block reads neighbours",
                todo="take one of them",
            )
        if self.balance == "class" and self.class_weights == "balanced":
            raise UsageError(
                "--balance class and --class-weights balanced even classes out twice",
                todo="take one of them",
            )
        if (
            len(self.fractions) != 3
            or not (min(self.fractions) >= 0 and self.fractions[0] * self.fractions[1] > 0)
            or not abs(sum(self.fractions) - 1) <= 1e-6
        ):
            raise UsageError(
                "--fractions", found=self.fractions,
                expected="train,validation,test that add up to 1, the first two above 0",
            )  # fmt: skip

    def _check_bags(self) -> None:
        """Whether all settings are of what is learnt from."""
        without = PATCHES_ONLY if self.mil is not None else BAGS_ONLY
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        plain = {**fields, **(BAG_DEFAULTS if self.mil is not None else {})}
        for name in without:
            value = getattr(self, name)
            if value not in (plain[name], fields[name]):
                found = f"--mil {self.mil}" if self.mil is not None else "no --mil"
                raise UsageError(
                    "STORES" if name == "stores" else flag(name), found=found,
                    expected="patches" if self.mil is not None else "--mil with a folder of features",
                    todo="leave it out",
                )  # fmt: skip
        if self.mil is not None and self.split_by in ("region", "patch"):
            raise UsageError(
                f"--split-by {self.split_by} divides slides, and --mil learns of whole ones",
                todo="split by patient, site or slide",
            )

    def _check_devices(self) -> None:
        match = DEVICES.fullmatch(self.devices)
        if match is None:
            raise UsageError(
                "--devices", found=repr(self.devices),
                expected="auto, cpu, cpu:N, gpu or gpu:0,1",
            )  # fmt: skip
        count = int(match["cpus"] or 1) if match["gpus"] is None else match["gpus"].count(",") + 1
        if self.batch_size < count:
            raise UsageError(
                "--batch-size", found=self.batch_size,
                expected=f"at least a patch for each of the {count} devices of --devices {self.devices}",
            )  # fmt: skip

    @property
    def patch_filter(self) -> PatchFilter:
        """Which patches are fit to be used."""
        return PatchFilter(
            min_tissue=self.min_tissue, min_focus=self.min_focus, exclude_pen=self.exclude_pen,
            exclude_dark=self.exclude_dark,
        )  # fmt: skip

    @property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """Those of `augment` that do something."""
        return tuple(name for name in AUGMENTATIONS if name in self.augment)

    @property
    def judging(self) -> JudgeSettings:
        """What the best model is judged by."""
        return JudgeSettings(
            positive=self.positive, threshold=self.threshold, top_k=self.top_k,
            resamples=self.resamples, seed=self.seed,
        )  # fmt: skip

    def to_toml(self, **further: Any) -> str:
        """The settings, and further ones, as `config.toml`; those that are None are left out."""
        # Late: this package is imported where tomli-w may not be.
        import tomli_w

        without = BAGS_ONLY if self.mil is None else PATCHES_ONLY
        values = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if value is not None and name not in without
        }
        return tomli_w.dumps(values | further)
