"""Time and memory of slide encoders in their published sizes with random weights, for 10,000 to 200,000 patches.

    python tools/bench_slide_encoders.py chief titan --patches 10000 50000 200000

Each measurement is in a separate process. Attention over all pairs takes hours on a CPU for many patches: with
`--share`, the first queries of each attention are computed, and the time of all is extrapolated from them. What was
computed is in the column "measured". Memory is that of the process, less that before the slide.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np


def measure(name: str, patches: int, devices: str, precision: str, share: float) -> dict[str, Any]:
    """Return the row of a measurement."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    from histopipe.pretrained.presets import slide_preset
    from histopipe.training import slide_layers
    from histopipe.training.devices import make_strategy
    from histopipe.training.slide_encoder import SlideEncoder, expected_weights

    preset, random = slide_preset(name), np.random.default_rng(0)
    assert preset is not None  # noqa: S101 - a name of a preset

    class Values:
        def __init__(self, shape: tuple[int, ...]) -> None:
            self.shape = shape

        def read(self) -> np.ndarray:
            return random.normal(0, 0.02, self.shape).astype(np.float32)

    shapes = expected_weights(preset.slide_network)
    names = make_strategy(devices).extended.worker_devices
    tensors: Any = {n: Values(s) for n, s in shapes.items()}
    encoder = SlideEncoder(preset.slide_network, tensors, names, precision)
    side = int(np.ceil(patches**0.5))
    corners = np.stack(np.divmod(np.arange(patches), side), axis=1).astype(float)
    features = random.normal(size=(patches, preset.slide_network.features)).astype(np.float32)
    slide = slide_layers.PlacedPatches(features, corners, 1.0)
    encoder.encode(
        slide._replace(features=features[:100], corners=corners[:100])
    )  # loads libraries
    before, spent, skipped = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [0.0], [0.0]
    whole = slide_layers.attend

    def some(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        """Compute the first queries only, and note the time of all."""
        count = max(1, int(q.shape[1] * share))
        began = time.monotonic()
        value, norm = whole(q[:, :count], k, v, bias)
        value[0, 0, 0].numpy()
        seconds = time.monotonic() - began
        spent[0] += seconds
        skipped[0] += seconds * (q.shape[1] / count - 1)
        rest = [[0, 0], [0, q.shape[1] - count]]
        return tf.pad(value, [*rest, [0, 0]]), tf.pad(norm, rest)

    if share < 1:
        from histopipe.training import slide_networks

        slide_networks.attend = some  # type: ignore[attr-defined]
    began = time.monotonic()
    encoder.encode(slide)
    seconds = time.monotonic() - began
    gpus = tf.config.list_logical_devices("GPU")
    return {
        "encoder": name,
        "patches": patches,
        "precision": precision,
        "measured": "all" if share >= 1 else f"{share:.2%} of the queries",
        "seconds": round(seconds + skipped[0], 1),
        "host_gb": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20, 2),
        "gpu_gb": round(tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**30, 2)
        if gpus
        else None,
    }


def main() -> None:
    """Measure, each in a separate process, and print a row per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("encoders", nargs="+")
    parser.add_argument("--patches", nargs="+", type=int, default=[10_000, 50_000, 200_000])
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--precision", default="float32")
    parser.add_argument(
        "--share", type=float, default=1.0, help="Share of the queries of attention."
    )
    parser.add_argument("--here", action="store_true", help="In this process.")
    chosen = parser.parse_args()
    for name in chosen.encoders:
        for patches in chosen.patches:
            if chosen.here:
                row = measure(name, patches, chosen.devices, chosen.precision, chosen.share)
                print(json.dumps(row), flush=True)
                continue
            command = [sys.executable, __file__, name, "--patches", str(patches), "--here"]
            options = {
                "devices": chosen.devices,
                "precision": chosen.precision,
                "share": chosen.share,
            }
            command += [f"--{key}={value}" for key, value in options.items()]
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
