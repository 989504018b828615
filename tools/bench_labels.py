"""Measure labelling with many slides: time to the first picture, of a retraining, the queue, a pass, the map, and memory.

    python tools/bench_labels.py FOLDER [--slides 5000] [--dimension 384]

Slides are TIFF files of 1,024 patches of 16² with different contents, one per patient; features are random numbers, from
which a part of the class can be read. Store and features are made once, and kept in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from tifffile import TiffWriter

from histopipe.demo.synthetic_slides import write_tiff_page
from histopipe.features.feature_file import writing
from histopipe.features.feature_sets import record_encoder
from histopipe.geometry import Size
from histopipe.store.store import Store

COMMAND = [sys.executable, "-P", "-m", "histopipe"]
CLASSES = "tumour,stroma"
TOKEN = "bench-of-labels-1"  # noqa: S105 - of this machine only
SIDE = 512


def make_inputs(folder: Path, count: int, dimension: int) -> None:
    """Write slides, ingest them, and write features."""
    (folder / "slides").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        rng = np.random.default_rng(number)
        tiles = rng.integers(100, 230, (4, SIDE // 2, SIDE // 2, 3), np.uint8)
        files = [simplejpeg.encode_jpeg(tile, colorsubsampling="420") for tile in tiles]
        with TiffWriter(folder / "slides" / f"s{number:05}.tiff") as file:
            size = Size(SIDE, SIDE), Size(SIDE // 2, SIDE // 2)
            write_tiff_page(file, *size, files, mpp=0.5, subsampling="420")
    ingest = ["ingest", "slides", "--patch-size", "16", "--tissue", "none", "--out", "patches.lmdb"]
    subprocess.run([*COMMAND, *ingest], cwd=folder, check=True, capture_output=True)
    features = folder / "features"
    features.mkdir()
    record_encoder(features, {"encoder": "random", "dimension": dimension})
    rng = np.random.default_rng(1)
    with Store(folder / "patches.lmdb") as store:
        for number, record in store.complete.items():
            index = store.index(number)
            corners = np.stack([index["x_l0"], index["y_l0"]], axis=1)
            values = rng.normal(size=(len(corners), dimension)).astype(np.float32)
            values[:, 0] += class_of(corners)
            path = features / f"{record.id}.h5"
            with writing(path, len(values), dimension, "float16") as writer:
                writer.append(values, corners)
                writer.finish({}, {"name": record.id})


def class_of(corners: Any) -> Any:
    """Return the class of patches: that of their column."""
    return np.asarray(corners)[..., 0] // 16 % 2


class Client:
    """A client of the viewer on a port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, path: str, body: Any = None) -> bytes:
        """Return the answer to a request; with a body, a POST."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=600)
        headers = {} if body is None else {"content-type": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", f"/{TOKEN}/{path}", data, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status == 202:  # it is being made
            time.sleep(0.1)
            return self.ask(path, body)
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {content[:200]!r}")
        return content


def memory_mb(pid: int) -> float:
    """Return the largest resident memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def timed(name: str, call: Any) -> Any:
    """Call a function, and print how long it took."""
    began = time.perf_counter()
    result = call()
    print(f"{name}: {time.perf_counter() - began:.2f} s", flush=True)
    return result


def measure_all(client: Client) -> None:
    """Print the times of what concerns all slides."""
    client.ask("pass", {})
    began = time.perf_counter()
    slowest = 0.0
    while json.loads(client.ask("labels"))["pass"]["running"]:
        asked = time.perf_counter()
        client.ask("slides/0/thumbnail")
        slowest = max(slowest, time.perf_counter() - asked)
    print(
        f"pass over all slides: {time.perf_counter() - began:.1f} s, answers within {slowest:.2f} s"
    )
    timed("map of principal components", partial(client.ask, "map/pca"))
    timed("labels of a store on the map", partial(client.ask, "map?layer=label"))
    timed("predictions on the map", partial(client.ask, "map?layer=learned"))


def measure(folder: Path, port: int) -> None:
    """Start the viewer, label, and print times."""
    options = ["--features", "features", "--journal", "labels", "--rater", f"r{time.time_ns()}"]
    page = ["--classes", CLASSES, "--port", str(port), "--token", TOKEN, "--no-browser"]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*COMMAND, "view", "patches.lmdb", *options, *page], cwd=folder, stdout=subprocess.PIPE
    )
    try:
        if process.stdout is not None:
            process.stdout.readline()
        client = Client(port)
        slides = json.loads(client.ask("slides"))["slides"]
        client.ask("slides/0/thumbnail")
        print(f"{len(slides)} slides; first thumbnail after {time.perf_counter() - began:.2f} s")
        state = json.loads(client.ask("labels"))
        slowest = 0.0
        while not state["loaded"]:
            asked = time.perf_counter()
            state = json.loads(client.ask("labels"))
            slowest = max(slowest, time.perf_counter() - asked)
            time.sleep(0.1)
        print(f"slowest answer while candidates are loaded: {slowest:.2f} s")
        print(f"{state['candidates']:,} candidates after {time.perf_counter() - began:.1f} s")
        for order in ("random", "far", "uncertain", "certain", "far"):
            ask = partial(client.ask, f"queue?order={order}&count=24")
            items = json.loads(timed(f"queue, {order}", ask))
            version = state["version"]
            for item in items:
                act = {"id": f"{time.time_ns()}", "act": "label", "session": state["session"]}
                name = CLASSES.split(",")[int(class_of([item["x"], 0]))]
                patches = [[item["number"], item["x"], item["y"]]]
                offered = patches if item.get("offered") else []
                client.ask("labels", {**act, "class": name, "patches": patches, "offered": offered})
            began = time.perf_counter()
            while state["version"] <= version or state["learning"]:
                state = json.loads(client.ask("labels"))
            print(
                f"learned after {time.perf_counter() - began:.2f} s, {sum(state['counts'])} labels"
            )
            if state["learned"]:
                timed("prediction of a slide", partial(client.ask, "slides/0/learned"))
        print("accuracy:", state["accuracy"])
        measure_all(client)
        print(f"largest memory of the server: {memory_mb(process.pid):,.0f} MB")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Make the inputs if they are missing, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--slides", type=int, default=5000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--port", type=int, default=8798)
    options = parser.parse_args()
    if not (options.folder / "features").exists():
        make_inputs(options.folder, options.slides, options.dimension)
    measure(options.folder, options.port)


if __name__ == "__main__":
    main()
