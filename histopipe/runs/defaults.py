"""Defaults of trainings on patches and bags, by what is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from histopipe.errors import UsageError

LITE, SMALL_CNN, NEW = "efficientnet-lite0", "small-cnn", "new"
SMALLEST_TRAINED = 64
"""Side of the smallest patches, in pixels, for which a network with trained weights is the default."""
DEFAULTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "patches": {
        # A new last layer, or low-rank updates, are as far from their best values as a new network.
        **{kind: {"learning_rate": 1e-3, "epochs": 20} for kind in (NEW, "lora:R")},
        "head": {"learning_rate": 1e-3, "epochs": 20, "head_copies": 4},
        **{kind: {"learning_rate": 3e-4, "epochs": 10} for kind in ("all", "last:N")},
    },
    "bags": {NEW: {"learning_rate": 3e-4, "epochs": 50}},
}
"""Defaults by what is trained: a new model, or which of its trained weights, by measurement (docs/design/recipes.md)."""


def default_model(patch_size: int) -> str:
    """Return the network for patches of this side in pixels, if the user names none."""
    return LITE if patch_size >= SMALLEST_TRAINED else SMALL_CNN


_TRAINABLE = re.compile(r"(?P<kind>all|head|last|lora)(:(?P<number>[1-9]\d{0,3}))?")


def parse_trainable(trainable: str) -> tuple[str, int]:
    """Return the kind and the number of a value of `--trainable`; 0 without a number.

    Raises:
        UsageError: the value is malformed.
    """
    match = _TRAINABLE.fullmatch(trainable)
    if match is None or (match["number"] is not None) != (match["kind"] in ("last", "lora")):
        raise UsageError(
            "--trainable", found=repr(trainable), expected="all, head, last:N or lora:R"
        )
    return match["kind"], int(match["number"] or 0)
