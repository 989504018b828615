"""Slide encoders against the code of their authors, by tiny networks with random weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

from helpers.paths import SLIDE_ENCODERS
from helpers.slide_patches import SIDE, TWIN_ROWS, slide_patches
from histopipe.pretrained.checkpoints import read_tensors
from histopipe.pretrained.slide_encoders import (
    SlideArchitecture,
    select_weights,
)
from histopipe.training.slide_encoder import SlideEncoder, expected_weights
from histopipe.training.slide_layers import SlidePatches
from histopipe.training.slide_networks import FAMILIES

NAMES = sorted(FAMILIES)


def architecture(name: str, **changes: object) -> SlideArchitecture:
    values = json.loads((SLIDE_ENCODERS / f"{name}.json").read_text())
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return SlideArchitecture(**{**values, **lists, **changes})


def load(name: str, **changes: object) -> SlideEncoder:
    network, path = architecture(name, **changes), SLIDE_ENCODERS / f"{name}.safetensors"
    tensors, family = read_tensors(path), FAMILIES[name]
    expected = expected_weights(network, tensors)
    selected = select_weights(tensors, expected, path, first=family.first, unused=family.unused)
    return SlideEncoder(network, selected)


def patches_of(rows: int, dimension: int = 24) -> SlidePatches:
    features, corners = slide_patches(rows, dimension)
    return SlidePatches(features, corners.astype(np.float64), SIDE)


def close(values: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(values, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("rows", TWIN_ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_of_the_authors(name: str, rows: int) -> None:
    expected, encoder = np.load(SLIDE_ENCODERS / f"{name}.npz"), load(name)
    vector, attention = encoder.encode(patches_of(rows))
    close(vector, expected[f"vector_{rows}"])
    if f"masked_{rows}" in expected:  # background or padding is left out here, and masked there
        close(vector, expected[f"masked_{rows}"])
    if f"attention_{rows}" in expected:
        assert attention is not None
        close(attention, expected[f"attention_{rows}"])
    if name == "moozy":
        slides = np.stack([vector, -vector, vector / 2])
        close(encoder.encode_patient(slides), expected[f"patient_{rows}"])
    if name == "longnet":
        mean, _ = load(name, pooling="mean").encode(patches_of(rows))
        close(mean, expected[f"mean_{rows}"])
