"""Measure the viewer: tiles per second and latency with several clients, memory, and time to the first picture.

    python tools/bench_view.py SLIDE.svs --clients 16 --tiles 10000

The clients are threads of this process with one connection each; they read tiles of all steps, as people who view
different places do. Each tile is read once until all were read, so most come from the slide and not from the cache.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from histopipe.slides.slide_files import open_slide
from histopipe.viewer.pictures import TILE

TOKEN = "benchmark-of-the-viewer"  # noqa: S105 - not a secret


def main() -> None:
    """Parse the arguments, measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("slide", type=Path)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tiles", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    print(json.dumps(measure(options), indent=2))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the viewer, read tiles with all clients, and return the figures."""
    begin = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "histopipe",
        "view",
        str(options.slide),
        "--port",
        "0",
        "--no-browser",
        "--json",
        "--token",
        TOKEN,
        "--workers",
        str(options.workers),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None  # noqa: S101 - for mypy
        text = b""
        while not text.endswith(b"}\n"):
            text += process.stdout.readline()
        port = json.loads(text)["port"]
        started = time.perf_counter() - begin
        first = _first_picture(port)
        tiles = _tiles(options.slide)
        random.Random(1).shuffle(tiles)
        chosen = [tiles[i % len(tiles)] for i in range(options.tiles)]
        # A few tiles of every worker first: opening the slide takes memory, too.
        _read_all(port, chosen[:64], options.clients)
        before = _memory(process.pid)
        begin = time.perf_counter()
        seconds = _read_all(port, chosen, options.clients)
        wall = time.perf_counter() - begin
        after = _memory(process.pid)
        process.terminate()
    return {
        "clients": options.clients,
        "tiles": len(chosen),
        "different_tiles": len(set(chosen)),
        "start_s": round(started, 2),
        "first_picture_s": round(first, 3),
        "tiles_per_s": round(len(chosen) / wall, 1),
        "median_ms": round(1000 * statistics.median(seconds), 1),
        "p95_ms": round(1000 * statistics.quantiles(seconds, n=20)[-1], 1),
        "memory_before_mb": before,
        "memory_after_mb": after,
    }


def _tiles(path: Path) -> list[str]:
    with open_slide(path) as slide:
        width, height = slide.info.size.width, slide.info.size.height
    tiles, step = [], 0
    while True:
        side = TILE * 2**step
        columns, rows = -(-width // side), -(-height // side)
        tiles += [f"slides/0/tile/{step}/{x}/{y}" for x in range(columns) for y in range(rows)]
        if columns == rows == 1:
            return tiles
        step += 1


def _first_picture(port: int) -> float:
    """Return the seconds for what the page needs before its first picture: list, slide and the coarsest tile."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begin = time.perf_counter()
    for path in ("", "static/openseadragon.min.js", "static/main.js", "slides", "slides/0"):
        answer = _get(connection, path)
    description = json.loads(answer)
    steps = max(
        0,
        (max(description["width"], description["height"]) - 1).bit_length() - TILE.bit_length() + 1,
    )
    _get(connection, f"slides/0/tile/{steps}/0/0")
    return time.perf_counter() - begin


def _get(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", f"/{TOKEN}/{path}")
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
    return body


def _read_all(port: int, paths: list[str], clients: int) -> list[float]:
    """Read paths with several clients at once; return the seconds of each."""
    seconds: list[float] = []
    waiting = iter(paths)
    lock = threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while True:
            with lock:
                path = next(waiting, None)
            if path is None:
                return
            begin = time.perf_counter()
            _get(connection, path)
            seconds.append(time.perf_counter() - begin)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds


def _memory(pid: int) -> dict[str, int]:
    """Return the proportional memory of the server and its workers, in MB."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    workers = [int(word) for path in children for word in path.read_text().split()]
    return {"server": _pss(pid), "workers": sum(map(_pss, workers))}


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1024


if __name__ == "__main__":
    main()
