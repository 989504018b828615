"""Encoders: networks that compute features of patches, loaded by the options of `embed` or from a record of them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from histopipe.dataset.options import StainNorm
from histopipe.errors import DamagedStore, UsageError
from histopipe.geometry import Mpp, same_scale
from histopipe.inference.slide_run import Network
from histopipe.inference.trained_patches import TrainedPatches
from histopipe.pretrained.sources import named_preset, own_file
from histopipe.runs import folder as run_folder
from histopipe.runs.config import Precision
from histopipe.runs.task_config import read_config
from histopipe.store.store import Store
from histopipe.system.progress import message
from histopipe.system.tensorflow import load_quietly

SMALL = "small-cnn"
"""The patch model of the quick start. As an encoder it has random weights, always the same: for demos and tests."""
_ONNX = ".onnx"
_ONNX_BATCH = 64
_DEFAULT_WEIGHTS = "imagenet"
_LIBRARIES = ("histopipe", "tensorflow", "tensorflow-cpu", "keras", "onnxruntime", "pillow")
_COMPARED = ("encoder", "sha256", "dimension", "patch_size", "precision")
"""Facts of a record that are shown if features of two encoders meet."""


class Encoder(Network, Protocol):
    """A network that computes features, with the size of its batches."""

    @property
    def batch_size(self) -> int:
        """Patches per batch, over all devices."""


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """The options of `embed` that choose an encoder."""

    model: str
    weights: str | None = None
    precision: Precision = "float32"
    xla: bool = False
    allow_mismatch: bool = False

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> EncoderChoice:
        """Return the choice in a record of `encoder_record`.

        Raises:
            UsageError: the record has none, because an earlier version made it.
        """
        try:
            return cls(**record["given"])
        except (KeyError, TypeError) as error:
            raise UsageError(
                "the features of the training do not record how to load their encoder",
                todo="predict a folder of features; or embed and train again",
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict. Paths are absolute."""
        facts = asdict(self)
        for name in ("model", "weights"):
            if facts[name] and Path(facts[name]).exists():
                facts[name] = str(Path(facts[name]).absolute())
        return facts

    def check(self, patch_size: int, mpps: Sequence[float | None]) -> str | None:
        """Check that the patches fit a preset. Return the mismatch, if it is allowed, or None.

        Raises:
            UsageError: they do not fit.
        """
        preset = None if self._is_run else named_preset(self.model)
        if preset is None:
            return None
        mismatch = preset.check_patches(patch_size, mpps, allowed=self.allow_mismatch)
        if mismatch:
            message(f"warning: {mismatch}; continuing because of --allow-mismatch")
        return mismatch

    @property
    def _is_run(self) -> bool:
        return (Path(self.model) / run_folder.CONFIG).exists()

    def load(self, patch_size: int, *, devices: str, batch_size: int | Literal["auto"]) -> Encoder:
        """Load the encoder onto its devices.

        Raises:
            UsageError: the encoder cannot be used.
            MachineShort: a library is not installed.
        """
        path, is_run = Path(self.model), self._is_run
        is_onnx = path.suffix == _ONNX
        if self.weights is not None and (is_onnx or is_run):
            raise UsageError(
                "--weights", found=f"--model {self.model}, which already contains weights",
                expected="--model with the name of a network",
            )  # fmt: skip
        if (self.precision != "float32" or self.xla) and (is_onnx or is_run):
            raise UsageError(
                "--xla" if self.xla else f"--precision {self.precision}", found=f"--model {self.model}",
                expected="a network that is not an ONNX file or a run",
            )  # fmt: skip
        if is_onnx:
            from histopipe.inference.onnx_encoder import OnnxEncoder  # imported here: optional

            size = _ONNX_BATCH if batch_size == "auto" else batch_size
            return OnnxEncoder(path, patch_size=patch_size, devices=devices, batch_size=size)
        untrained = named_preset(self.model) or own_file(self.model) or self.model == SMALL
        keras_network = load_quietly("histopipe.inference.keras_network")
        encoder: Encoder = keras_network.keras_encoder(
            path if is_run else self.model,
            weights=self.weights or ("none" if untrained else _DEFAULT_WEIGHTS),
            patch_size=patch_size, devices=devices, batch_size=batch_size,
            precision=self.precision, xla=self.xla,
        )  # fmt: skip
        return encoder

    def stain_norm(self) -> StainNorm:
        """Return the stain normalization that a run was trained with, or "none" for other encoders."""
        config = Path(self.model) / run_folder.CONFIG
        if not config.exists():
            return "none"
        method: StainNorm = read_config(config).get("stain_norm", "none")
        return method


def encoder_facts(encoder: Encoder) -> dict[str, Any]:
    """Return the facts of an encoder that `check_encoder` compares."""
    return {name: encoder.identity.get(name) for name in _COMPARED}


def encoder_record(
    choice: EncoderChoice, encoder: Encoder, stores: Sequence[Store], **facts: Any
) -> dict[str, Any]:
    """Return what features depend on, for `features.json`, and how to compute features of other slides."""
    scales = [record.patch_mpp for store in stores for record in store.complete.values()]
    mpps = sorted(scale for scale in scales if scale)
    patches = {
        "patch_size": stores[0].patch_size,
        "spec": dict(stores[0].spec),
        "patch_mpp": mpps[len(mpps) // 2] if mpps else None,
    }
    return {
        **encoder.identity, **facts, "libraries": _versions(), "given": choice.to_json(),
        "patches": patches,
    }  # fmt: skip


def trained_patches(record: Mapping[str, Any], owner: Path) -> TrainedPatches:
    """Return the patches of a record. `owner` is the folder of the run.

    Raises:
        DamagedStore: the record is damaged.
    """
    try:
        patches = record["patches"]
        return TrainedPatches(
            owner,
            int(patches["patch_size"]),
            patches["spec"],
            patches["patch_mpp"],
            record["stain_norm"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedStore(
            f"the record of the encoder in {owner} is damaged", found=repr(error)[:200]
        ) from error


def check_encoder(actual: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Check that features are of the encoder, and the scale, of a training. `where` names them in a message.

    Raises:
        UsageError: they are not.
    """
    names = (*_COMPARED, "stain_norm")
    pairs: list[tuple[str, Any, Any]] = [
        (name, actual.get(name), expected.get(name)) for name in names
    ]
    own_mpp, mpp = ((record.get("patches") or {}).get("patch_mpp") for record in (actual, expected))
    if own_mpp and mpp and not same_scale(Mpp(own_mpp), Mpp(mpp)):
        pairs.append(("µm per pixel", own_mpp, mpp))
    other = [(name, value, required) for name, value, required in pairs[1:] if value != required]
    if not other:
        return  # the same weights may have another name
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    raise UsageError(
        f"{where}: other features than in the training",
        found=", ".join(f"{name} {_short(value)}" for name, value, _ in differing),
        expected=", ".join(f"{name} {_short(required)}" for name, _, required in differing),
        todo="embed the slides with the encoder and the patches of the training",
    )  # fmt: skip


def _short(value: Any) -> str:
    """Return a value for a message: checksums are long."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
