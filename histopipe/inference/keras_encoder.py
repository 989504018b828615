"""Features by a Keras network: what a run's model sees before its last layer, or a network of `keras.applications`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from histopipe.errors import DamagedStore
from histopipe.inference.forward import Forward, trained_model
from histopipe.training.models import LOGITS, build_encoder


class KerasEncoder(Forward):
    """A network on the devices of a strategy.

    Args:
        model: a run's folder, or the name of a network.
        weights: of a named network.
        patch_size: side of the patches.
        devices: as for training.
        batch_size: patches at once, over all devices.

    Raises:
        UsageError: no such network or device, weights that cannot be had, or patches of another size.
        DamagedStore: the run's model cannot be read.
    """

    def __init__(
        self, model: str | Path, *, weights: str, patch_size: int, devices: str, batch_size: int
    ) -> None:
        def make() -> keras.Model:
            if isinstance(model, Path):
                return _before_last_layer(model, patch_size)
            return build_encoder(model, patch_size=patch_size, weights=weights)

        super().__init__(make, devices=devices, batch_size=batch_size)
        # The weights themselves, whatever the file that they came from is called.
        self.facts: Mapping[str, Any] = {
            "encoder": model.name if isinstance(model, Path) else f"{model} ({weights})",
            "dimension": self.dimension,
            "patch_size": patch_size,
            "sha256": self.sha256,
        }


def _before_last_layer(folder: Path, patch_size: int) -> keras.Model:
    model = trained_model(folder, patch_size)
    try:
        return keras.Model(model.input, model.get_layer(LOGITS).input)
    except ValueError as error:
        raise DamagedStore(
            f"the model of {folder} has no layer {LOGITS!r}",
            expected="the model of a patch training",
        ) from error
