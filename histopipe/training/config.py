"""Every setting of a training, as one frozen value that can be written down and run again."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from histopipe.dataset.batches import OnError
from histopipe.dataset.kinds import AUGMENTATIONS, Augmentation, StainNorm
from histopipe.dataset.sampling import Balance
from histopipe.dataset.splits import SplitBy
from histopipe.errors import UsageError

Optimizer = Literal["adam", "adamw", "adagrad", "sgd"]
ClassWeights = Literal["none", "balanced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of one training.

    Attributes:
        stores: paths of the stores.
        labels: a labels file that replaces the recorded labels; None for those.
        allow_extra_rows: ignore rows of that file that name no slide.
        model: "small-cnn" or the name of a `keras.applications` model.
        weights: "none", "imagenet", or a weights file for the backbone.
        epochs, batch_size, seed: as everywhere; the batch is global, over all replicas.
        split_by, fractions, region_um: how patches are split into train, validation and test.
        splits: a splits.json to use instead of making one.
        allow_leaks: train although a patient or slide is on several sides.
        optimizer, learning_rate: of the optimizer.
        class_weights: "balanced" weighs each class by the inverse of its patches.
        dropout: share of features dropped before the last layer, 0 to 1.
        augment: "none", or of flips, crop, colour and stain those that training patches go through.
        stain_norm: give every slide the stain of one reference; the saved model then wants such patches.
        balance: draw classes, slides or patients equally often in training.
        max_per_slide: training patches of a slide in an epoch, at most; 0 for all.
        shuffle_block: shuffle blocks of so many neighbours, for slow disks; 0 shuffles all patches.
        on_error: "skip" goes on without a patch that is damaged in the store.
        patience: epochs without a better validation AUC before stopping; 0 never stops.
        devices: "auto", "cpu", "cpu:N", "gpu" or "gpu:0,1".
        deterministic: bitwise repeatable operations, slower.

    Raises:
        UsageError: a value is out of range.
    """

    stores: tuple[str, ...] = ("patches.lmdb",)
    labels: str | None = None
    allow_extra_rows: bool = False
    model: str = "small-cnn"
    weights: str = "none"
    epochs: int = 20
    batch_size: int = 64
    seed: int = 1
    split_by: SplitBy = "patient"
    fractions: tuple[float, ...] = (0.7, 0.15, 0.15)
    region_um: float = 250.0
    splits: str | None = None
    allow_leaks: bool = False
    optimizer: Optimizer = "adam"
    learning_rate: float = 1e-3
    class_weights: ClassWeights = "none"
    dropout: float = 0.15
    augment: tuple[str, ...] = ("flips",)
    stain_norm: StainNorm = "none"
    balance: Balance = "none"
    max_per_slide: int = 0
    shuffle_block: int = 0
    on_error: OnError = "raise"
    patience: int = 5
    devices: str = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        _at_least("--epochs", self.epochs, 1)
        _at_least("--batch-size", self.batch_size, 1)
        _at_least("--patience", self.patience, 0)
        _at_least("--seed", self.seed, 0)
        _one_of("--split-by", self.split_by, get_args(SplitBy))
        _one_of("--optimizer", self.optimizer, get_args(Optimizer))
        _one_of("--class-weights", self.class_weights, get_args(ClassWeights))
        _one_of("--stain-norm", self.stain_norm, get_args(StainNorm))
        _one_of("--balance", self.balance, get_args(Balance))
        _one_of("--on-error", self.on_error, get_args(OnError))
        _at_least("--max-per-slide", self.max_per_slide, 0)
        _at_least("--shuffle-block", self.shuffle_block, 0)
        for name in self.augment:
            _one_of("--augment", name, ("none", *AUGMENTATIONS))
        if len(set(self.augment)) < len(self.augment) or (
            "none" in self.augment and len(self.augment) > 1
        ):
            raise UsageError(
                "--augment",
                found=",".join(self.augment),
                expected="none, or a list without doubles",
            )
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
        _positive("--learning-rate", self.learning_rate)
        _positive("--region-um", self.region_um)
        if not 0 <= self.dropout < 1:
            raise UsageError("--dropout", found=self.dropout, expected="from 0 to below 1")
        if (
            len(self.fractions) != 3
            or not (min(self.fractions) >= 0 and self.fractions[0] * self.fractions[1] > 0)
            or not abs(sum(self.fractions) - 1) <= 1e-6
        ):
            raise UsageError(
                "--fractions", found=self.fractions,
                expected="train,validation,test that add up to 1, the first two above 0",
            )  # fmt: skip

    @property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """Those of `augment` that do something."""
        return tuple(name for name in AUGMENTATIONS if name in self.augment)

    def to_toml(self) -> str:
        """The settings as `config.toml`; those that are None are left out."""
        # Late: this package is imported where tomli-w may not be.
        import tomli_w

        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return tomli_w.dumps(values)


def read_config(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, by the names of `TrainConfig`.

    Raises:
        UsageError: the file cannot be read, or names something else.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error), expected="TOML") from error
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(
            f"{path}: unknown settings", found=", ".join(unknown), expected=", ".join(sorted(known))
        )
    for field in dataclasses.fields(TrainConfig):
        if field.name in values and not _fits(values[field.name], field.default):
            raise UsageError(
                f"{path}: {field.name}",
                found=repr(values[field.name]),
                expected=f"such as {field.default!r}" if field.default is not None else "a text",
            )
    return values


def _fits(value: object, default: object) -> bool:
    """Whether a value from TOML is of a setting's type, which its default shows."""
    if isinstance(default, tuple):
        return isinstance(value, list) and all(_fits(v, default[0]) for v in value)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default) if default is not None else isinstance(value, str)


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UsageError(name, found=value, expected="more than 0")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(name, found=value, expected=f"{least} or more")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(name, found=repr(value), expected=" or ".join(allowed))
