"""Write a tiny slide encoder with random weights, for docs/how-to/slide-encoders.md: tiny.toml and tiny.safetensors.

    python tools/make_tiny_slide_encoder.py FOLDER

It takes features of the network `small-cnn`, of patches of 128 pixels at 0.5 mpp.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from histopipe.pretrained.presets import slide_preset
from histopipe.training.slide_encoder import expected_weights

PRESET = """title = "Tiny slide encoder with random weights"
licence = "Apache-2.0"
patch_encoders = ["small-cnn (none)"]
patch_size = 128
mpp = 0.5

[network]
family = "titan"
features = 64
width = 48
hidden = 96
depth = 2
heads = 6
pooling = "attention"
"""


def main() -> None:
    """Write both files."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    path, random = folder / "tiny.toml", np.random.default_rng(0)
    path.write_text(PRESET)
    preset = slide_preset(str(path))
    assert preset is not None  # noqa: S101 - written above
    values = {
        name: random.normal("norm" in name and "weight" in name, 0.1, shape).astype(np.float32)
        for name, shape in expected_weights(preset.slide_network).items()
    }
    save_file(values, path.with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
