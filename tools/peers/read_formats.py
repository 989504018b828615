"""Measure the reading speed of a store, a TFRecord file and an image folder. Called by tools/bench_peers.py."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_reader import (
    batches_of,
    compare,
    folder,
    ours,
    tfrecord,
    values_of,
    write_folder,
    write_tfrecord,
)

from histopipe.store.store import Store

STEPS = 40


def main() -> None:
    """Write the formats, read them in turns, and print patches per second as JSON."""
    path, where = Path(sys.argv[1]), Path(sys.argv[2])
    values = values_of(path)
    record, files = where / "patches.tfrecord", where / "patches-folder"
    if not record.exists():
        write_tfrecord(values, record)
    if not files.exists():
        write_folder(values, files)
    with Store(path) as store:
        ways = {
            "histopipe": functools.partial(ours, batches_of(store)),
            "TFRecord, shuffle(2048)": functools.partial(tfrecord, record, 2048),
            "image folder, Keras": functools.partial(folder, files),
        }
        print(json.dumps(compare(ways, STEPS)))


if __name__ == "__main__":
    main()
