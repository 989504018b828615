"""Check whether an encoder can be used here: files, checksum, memory, licence, and the time of a thousand slides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from timeit import repeat
from typing import Any, Literal

import numpy as np

from histopipe.errors import HistopipeError
from histopipe.inference.encoder import load_encoder
from histopipe.inference.options import EmbedOptions
from histopipe.pretrained.architecture import NAMINGS, select
from histopipe.pretrained.checkpoints import read_tensors
from histopipe.pretrained.encoders import encoders, find_weights
from histopipe.pretrained.presets import Preset
from histopipe.system.files import file_sha256
from histopipe.system.tensorflow import load_quietly
from histopipe.system.worker_pool import available_memory

SLIDES, PATCHES = 1000, 5000
"""Slides whose time is shown, and patches of each: a resection at 0.5 mpp has some thousands."""
_BATCH, _ROUNDS = 16, 2
"""Patches of a batch, and batches or slides that are timed: the first one also prepares."""
_SHARE = 1.5
"""Memory of a network while it is loaded, relative to its weights; see docs/design/foundation-models.md."""


State = Literal["good", "warning", "bad"]
"""Result of a check. warning: it works, but slowly or not for long. bad: something does not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: its name, what was found, what to do (if anything), and details for programs."""

    name: str
    found: str
    state: State = "good"
    todo: str | None = None
    facts: dict[str, Any] | None = None


def encoder_checks(name: str, weights: str | Path | None) -> Iterator[Check]:
    """Check an encoder by its name and the file or folder of its weights. A check that fails ends them."""
    (preset,) = encoders(name).presets
    yield Check("licence", preset.licence or "unknown: read the model's page")
    needed = 4 * preset.parameters * _SHARE
    free = available_memory()
    short = "use a machine with more memory" if needed > free else None
    text = f"{needed / 2**30:.1f} GiB for the weights, {free / 2**30:.1f} GiB available"
    yield Check("memory of the encoder", text, "bad" if short else "good", short)
    if weights is None:
        yield Check("weights", "no --weights", "warning", f"see `histopipe encoders {name}`")
        return
    try:
        path = find_weights(preset, Path(weights))
        _check_shapes(preset, path)
        yield Check(
            "weights", f"{path.name}, {path.stat().st_size / 2**20:.0f} MiB, all of their shape"
        )
        yield _checksum(preset, path)
        hours = _seconds(preset, path) * SLIDES / 3600
        yield Check(
            "time",
            f"{hours:.1f} h for {SLIDES:,} slides of {PATCHES:,} patches on this machine, without reading",
            facts={"hours": hours},
        )
    except HistopipeError as error:
        yield Check("weights", str(error), "bad", "correct --weights")


def _check_shapes(preset: Preset, path: Path) -> None:
    """Raise a UsageError if the file is of another network."""
    if preset.network is not None:
        load_quietly("histopipe.training.slide_encoder").read_weights(preset.network, path)
    elif preset.architecture is not None:
        naming, size = NAMINGS[preset.naming], preset.preprocessing.trained
        select(read_tensors(path), preset.architecture, naming, size, path)


def _checksum(preset: Preset, path: Path) -> Check:
    digest, published = file_sha256(path), preset.sha256
    if not published:
        return Check(
            "checksum", f"SHA-256 {digest}; none is recorded here: compare it with the model's page"
        )
    wrong = None if digest in published else "download the file again"
    text = f"SHA-256 {digest}, {'not ' if wrong else ''}that of the published file"
    return Check("checksum", text, "warning" if wrong else "good", wrong)


def _seconds(preset: Preset, path: Path) -> float:
    """Return the seconds of a slide, measured on made-up patches."""
    random = np.random.default_rng(0)
    if preset.network is not None:
        module = load_quietly("histopipe.training.slide_encoder")
        encoder = module.load_slide_encoder(
            preset.network, path, devices="auto", precision="float32"
        )
        side = int(PATCHES**0.5)
        corners = np.stack(np.divmod(np.arange(side * side), side), axis=1).astype(float)
        features = random.normal(size=(side * side, preset.network.features)).astype(np.float32)
        patches = module.PlacedPatches(features, corners, 1.0)
        return min(repeat(lambda: encoder.encode(patches), number=1, repeat=_ROUNDS))
    options = EmbedOptions(model=(preset.name,), weights=(path,), batch_size=_BATCH)
    size = preset.preprocessing.resized
    network = load_encoder(options, size)
    images = random.integers(0, 256, (_BATCH, size, size, 3), np.uint8)
    batch = repeat(
        lambda: network.finish(network.start(network.prepare(images))), number=1, repeat=_ROUNDS
    )
    return min(batch) * PATCHES / _BATCH
