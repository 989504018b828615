"""A tiny slide encoder, and folders of features for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from helpers.bags import write_bag
from helpers.paths import SLIDE_ENCODERS
from helpers.slide_patches import slide_patches

ENCODER = {
    "encoder": "tiny",
    "sha256": "0" * 64,
    "precision": "float32",
    "dimension": 24,
    "patches": {"patch_size": 224, "patch_mpp": 0.5, "spec": {}},
}
"""Record of the features of patches."""


def preset_file(folder: Path, family: str = "moozy", **changes: Any) -> Path:
    """Write the preset of a twin, which takes features of `ENCODER`."""
    network = json.loads((SLIDE_ENCODERS / f"{family}.json").read_text())
    values = {"patch_encoders": ["tiny"], "patch_size": 224, "mpp": 0.5, **changes}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    lines += ["[network]", *(f"{key} = {json.dumps(value)}" for key, value in network.items())]
    path = folder / f"{family}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def options(folder: Path, family: str = "moozy", **changes: Any) -> dict[str, Any]:
    """Options of `embed` for a twin."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = SLIDE_ENCODERS / f"{family}.safetensors"
    return {
        "model": str(preset_file(folder, family)),
        "weights": str(weights),
        "devices": "cpu",
        **changes,
    }


def features_folder(folder: Path, slides: dict[str, int], **record: Any) -> Path:
    """Write features of slides with their numbers of patches, of two slides per patient."""
    for number, (name, rows) in enumerate(slides.items()):
        features, corners = slide_patches(rows, 24)
        label = "ab"[number // 2 % 2]
        features[:, 0] += 2 * (label == "b")
        write_bag(
            folder / f"{name}.h5",
            features,
            corners.astype(np.int64),
            label=label,
            patient=f"p{number // 2}",
        )
    (folder / "features.json").write_text(json.dumps({**ENCODER, **record}))
    return folder
