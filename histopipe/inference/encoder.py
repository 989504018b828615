"""What turns patches into features: a run's model, a network of `keras.applications`, or an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from histopipe.errors import UsageError
from histopipe.inference.stream import Network
from histopipe.runs import folder as run_folder
from histopipe.system.tensorflow import load_quietly

ONNX = ".onnx"
DEFAULT_WEIGHTS = "imagenet"


class Encoder(Network, Protocol):
    """Turns batches of patches into features."""

    @property
    def dimension(self) -> int:
        """Features of a patch."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the features depend on, for a JSON file; equal for equal encoders."""


def load_encoder(
    model: str, *, weights: str | None, patch_size: int, devices: str, batch_size: int
) -> Encoder:
    """Find an encoder and make it ready.

    Args:
        model: a run's folder, an ONNX file, or the name of a network.
        weights: of a network: "imagenet" if not given, "none", or a file.
        patch_size: side of the patches.
        devices: as for training.
        batch_size: patches at once, over all devices.

    Raises:
        UsageError: there is no such encoder, or it does not take such patches.
        MachineShort: what runs it is not installed.
    """
    path = Path(model)
    is_onnx, is_run = path.suffix == ONNX, (path / run_folder.CONFIG).exists()
    if weights is not None and (is_onnx or is_run):
        raise UsageError(
            "--weights", found=f"--model {model}, which has its own",
            expected="the name of a network with it",
        )  # fmt: skip
    if is_onnx:
        from histopipe.inference.onnx_encoder import OnnxEncoder  # late: an extra of its own

        return OnnxEncoder(path, patch_size=patch_size, devices=devices, batch_size=batch_size)
    keras_encoder = load_quietly("histopipe.inference.keras_encoder")
    made: Encoder = keras_encoder.KerasEncoder(
        path if is_run else model, weights=weights or DEFAULT_WEIGHTS, patch_size=patch_size,
        devices=devices, batch_size=batch_size,
    )  # fmt: skip
    return made
