"""Comparison of the records of encoders, which are in folders of features and in runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from histopipe.errors import UsageError
from histopipe.geometry import Mpp, same_scale

COMPARED = ("encoder", "sha256", "dimension", "patch_size", "precision")
"""Names in the record of an encoder that are compared, and shown if features of two encoders meet."""


def check_encoder(actual: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Check that features are of the encoder, and the scale, of a training. `where` names them in a message.

    Raises:
        UsageError: they are not.
    """
    pairs = {
        name: (actual.get(name), expected.get(name))
        for name in (*COMPARED, "stain_norm", "level", "of_sha256")
    }
    mpp, mpp_of_training = (
        (record.get("patches") or {}).get("patch_mpp") for record in (actual, expected)
    )
    if mpp and mpp_of_training and not same_scale(Mpp(mpp), Mpp(mpp_of_training)):
        pairs["µm per pixel"] = mpp, mpp_of_training
    differing = [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    if any(name != "encoder" for name, *_ in differing):  # the same weights may have another name
        raise UsageError(
            f"{where}: other features than in the training",
            found=", ".join(f"{name} {_short(value)}" for name, value, _ in differing),
            expected=", ".join(f"{name} {_short(required)}" for name, _, required in differing),
            todo="embed the slides with the encoder and the patches of the training",
        )


def _short(value: Any) -> str:
    """Return a value for a message: checksums are long."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]
