"""Compare the CPU time of `histopipe embed` with that of a plain Keras loop over the same patches.

    python tools/bench_embed.py STORE NETWORK.keras [--repeats 3] [--batch-size 64]

The loop is what a user of Keras writes: the patches are JPEG files in a folder, a `tf.data` pipeline decodes them in
parallel, `predict_on_batch` computes full batches, which may mix slides, and the features are saved as one array. The
network and its preprocessing, in NETWORK.toml, are the same. Both are new processes, and their imports count. They run
alternately; the median of user and system time and the ratio are printed, and whether the features agree.

With --earlier PYTHON, the `histopipe` of another Python is measured, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

LOOP = "loop"


def main() -> None:
    """Measure, and print a table."""
    if sys.argv[1:2] == [LOOP]:
        run_loop(Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("store", type=Path)
    parser.add_argument("network", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--earlier", help="another Python, with another histopipe")
    options = parser.parse_args()
    size = str(options.batch_size)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        count = write_patches(options.store, folder / "patches")
        embed = ["-c", "from histopipe.cli import main; main()", "embed", str(options.store)]
        flags = ["--model", str(options.network), "--batch-size", size, "--allow-mismatch"]
        commands = {
            "plain Keras": [
                sys.executable,
                "-P",
                __file__,
                LOOP,
                str(folder / "patches"),
                str(options.network),
                "OUT",
                size,
            ],
            "histopipe embed": [sys.executable, "-P", *embed, *flags, "--out", "OUT"],
        }
        if options.earlier:
            commands["earlier"] = [options.earlier, "-P", *embed, *flags, "--out", "OUT"]
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for number in range(options.repeats):
            for name, words in commands.items():
                out = str(folder / f"{name}-{number}")
                seconds[name].append(
                    cpu_seconds([out if word == "OUT" else word for word in words])
                )
                print(f"{name}: {seconds[name][-1]:.1f} s", file=sys.stderr)
        print(f"{count:,} patches, median CPU time of {options.repeats} runs each")
        base = statistics.median(seconds["plain Keras"])
        for name, values in seconds.items():
            each = ", ".join(f"{value:.1f}" for value in values)
            middle = statistics.median(values)
            print(f"{name:16} {middle:6.1f} s  ratio {middle / base:.2f}  ({each})")
        print(f"largest difference of a feature: {difference(folder):.2g}")


def write_patches(store: Path, folder: Path) -> int:
    """Write the patches of a store as `SLIDE/ROW.jpg`, and return their number."""
    from histopipe.store.store import Store

    count = 0
    with Store(store) as opened:
        for number, record in opened.complete.items():
            for row in range(record.planned):
                path = folder / record.id / f"{row:06}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(opened.value(number, row))
                count += 1
    return count


def cpu_seconds(command: list[str]) -> float:
    """Run a command, and return its user and system time."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(log.read().decode())
    return usage.ru_utime + usage.ru_stime


def run_loop(folder: Path, network: Path, out: Path, batch_size: int) -> None:
    """Compute the features of the JPEG files in a folder with Keras alone."""
    import keras
    import numpy as np
    import tensorflow as tf

    settings = tomllib.loads(network.with_suffix(".toml").read_text())["input"]
    paths = sorted(str(path) for path in folder.rglob("*.jpg"))
    image = keras.Input((None, None, 3), dtype="uint8")
    variance = np.square(np.array(settings["std"]) * 255)
    mean = np.array(settings["mean"]) * 255
    resized = keras.layers.Resizing(settings["size"], settings["size"], settings["interpolation"])(
        image
    )
    normalized = keras.layers.Normalization(mean=mean, variance=variance)(resized)
    model = keras.Model(image, keras.models.load_model(network, compile=False)(normalized))

    def decode(path: tf.Tensor) -> tf.Tensor:
        return tf.io.decode_jpeg(tf.io.read_file(path), 3, dct_method="INTEGER_ACCURATE")

    dataset = tf.data.Dataset.from_tensor_slices(paths).map(decode, tf.data.AUTOTUNE)
    batches = dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)
    features = np.concatenate([model.predict_on_batch(batch) for batch in batches])
    out.mkdir()
    np.savez(out / "features.npz", features=features, paths=paths)


def difference(folder: Path) -> float:
    """Return the largest difference between the features of both."""
    import numpy as np

    from histopipe.features.feature_file import read_features, read_header

    plain = np.load(folder / "plain Keras-0" / "features.npz")
    slides = [Path(path).parent.name for path in plain["paths"].tolist()]
    largest = 0.0
    for name in set(slides):
        rows = [number for number, slide in enumerate(slides) if slide == name]
        features = read_features(read_header(folder / "histopipe embed-0" / f"{name}.h5"))
        largest = max(largest, float(np.abs(features - plain["features"][rows]).max()))
    return largest


if __name__ == "__main__":
    main()
