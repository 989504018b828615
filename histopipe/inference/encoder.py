"""Encoders compute features of patches: the model of a run, a network of `keras.applications`, or an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from histopipe.errors import UsageError
from histopipe.inference.patch_stream import Network
from histopipe.runs import folder as run_folder
from histopipe.system.tensorflow import load_quietly

ONNX = ".onnx"
DEFAULT_WEIGHTS = "imagenet"


class Encoder(Network, Protocol):
    """A network that computes features of patches."""

    @property
    def dimension(self) -> int:
        """Number of features per patch."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that the features depend on, as JSON values; equal for equal encoders."""


def load_encoder(
    model: str, *, weights: str | None, patch_size: int, devices: str, batch_size: int
) -> Encoder:
    """Load an encoder onto its devices.

    Args:
        model: the folder of a run, an ONNX file, or the name of a network.
        weights: of a named network: "imagenet" (default), "none", or a file.
        patch_size: side of the patches in pixels.
        devices: as for training.
        batch_size: patches per batch, over all devices.

    Raises:
        UsageError: there is no such encoder, or it does not take such patches.
        MachineShort: TensorFlow or onnxruntime is not installed.
    """
    path = Path(model)
    is_onnx, is_run = path.suffix == ONNX, (path / run_folder.CONFIG).exists()
    if weights is not None and (is_onnx or is_run):
        raise UsageError(
            "--weights", found=f"--model {model}, which has its own",
            expected="the name of a network with it",
        )  # fmt: skip
    if is_onnx:
        from histopipe.inference.onnx_encoder import OnnxEncoder  # late: an optional dependency

        return OnnxEncoder(path, patch_size=patch_size, devices=devices, batch_size=batch_size)
    keras_network = load_quietly("histopipe.inference.keras_network")
    encoder: Encoder = keras_network.KerasEncoder(
        path if is_run else model, weights=weights or DEFAULT_WEIGHTS, patch_size=patch_size,
        devices=devices, batch_size=batch_size,
    )  # fmt: skip
    return encoder
