"""Every setting of a training, as one frozen value that can be written down and run again."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from histopipe.dataset.batches import OnError
from histopipe.dataset.kinds import AUGMENTATIONS, Augmentation, StainNorm
from histopipe.dataset.sampling import Balance
from histopipe.dataset.splits import SplitBy
from histopipe.errors import UsageError

Optimizer = Literal["adam", "adamw", "adagrad", "sgd"]
ClassWeights = Literal["none", "balanced"]
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16", "float64"]
Schedule = Literal["constant", "cosine"]
Communication = Literal["auto", "ring", "nccl"]


DEVICES = re.compile(r"auto|cpu(:(?P<cpus>[1-9]\d*))?|gpu(:(?P<gpus>\d+(,\d+)*))?")
"""What `--devices` may be."""
_LEAST = {
    "epochs": 1,
    "batch_size": 1,
    "accumulate": 1,
    "patience": 0,
    "seed": 0,
    "max_per_slide": 0,
    "shuffle_block": 0,
    "warmup_steps": 0,
}
_MOST_SEED = (1 << 32) - 1
_ABOVE_0 = ("learning_rate", "region_um", "save_minutes", "worker_timeout")
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
        epochs, batch_size, seed: as everywhere; the batch is global, over all replicas.
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
        max_per_slide: training patches of a slide in an epoch, at most; 0 for all.
        shuffle_block: shuffle blocks of so many neighbours, for slow disks; 0 shuffles all patches.
        on_error: "skip" goes on without a patch that is damaged in the store.
        patience: epochs without a better validation AUC before stopping; 0 never stops.
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
            if not _fits(value, field.default) and value != field.default:
                raise UsageError(_flag(field.name), found=repr(value), expected=_like(field))
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                _one_of(_flag(name), getattr(self, name), get_args(kind))
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(
                    _flag(name), found=getattr(self, name), expected=f"{least} or more"
                )
        if self.seed > _MOST_SEED:
            raise UsageError("--seed", found=self.seed, expected=f"at most {_MOST_SEED:,}")
        for name in _ABOVE_0:
            if not 0 < getattr(self, name) < inf:
                raise UsageError(_flag(name), found=getattr(self, name), expected="more than 0")
        for name, most in _BELOW.items():
            if not 0 <= getattr(self, name) < most:
                raise UsageError(
                    _flag(name), found=getattr(self, name), expected=f"from 0 to below {most:g}"
                )
        for name in self.augment:
            _one_of("--augment", name, ("none", *AUGMENTATIONS))
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
    def augmentations(self) -> tuple[Augmentation, ...]:
        """Those of `augment` that do something."""
        return tuple(name for name in AUGMENTATIONS if name in self.augment)

    def to_toml(self) -> str:
        """The settings as `config.toml`; those that are None are left out."""
        # Late: this package is imported where tomli-w may not be.
        import tomli_w

        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return tomli_w.dumps(values)


MAY_CHANGE = (
    "epochs", "patience", "devices", "on_error", "accumulate", "save_minutes", "tensorboard",
    "communication", "worker_timeout", "log_device_placement",
)  # fmt: skip
"""Settings that may change in the middle of a run: what was trained so far stays meaningful."""


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings, lists as tuples.

    Raises:
        UsageError: there is no such setting.
    """
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    unknown = sorted(set(settings) - names)
    if unknown:
        raise UsageError(
            "unknown settings", found=", ".join(unknown), expected=", ".join(sorted(names))
        )
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def resumed(folder: Path, changes: dict[str, Any]) -> TrainConfig:
    """A run's own settings, and what is to change.

    Raises:
        UsageError: the folder holds no run, or the change would make what was trained so far meaningless.
    """
    path = folder / "config.toml"
    if not path.is_file():
        raise UsageError(
            f"no run to resume in {folder}", expected="the folder of a run, with its config.toml"
        )
    recorded = read_config(path)
    refused = [
        "STORES" if name == "stores" else _flag(name)
        for name, value in changes.items()
        if name not in MAY_CHANGE and known({name: value}) != known({name: recorded.get(name)})
    ]
    if refused:
        raise UsageError(
            "--resume goes on with the run's own settings", found=", ".join(refused),
            expected="only --out and " + ", ".join(_flag(name) for name in MAY_CHANGE),
        )  # fmt: skip
    return TrainConfig(**known(recorded | changes))


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
                expected=_like(field),
            )
    return values


def _like(field: dataclasses.Field[Any]) -> str:
    return f"such as {field.default!r}" if field.default is not None else "a text"


def _fits(value: object, default: object) -> bool:
    """Whether a value is of a setting's type, which its default shows."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(_fits(v, default[0]) for v in value)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default) if default is not None else isinstance(value, str)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(name, found=repr(value), expected=" or ".join(allowed))
