"""Benchmark an ingest from a slow disk: in place, with staging, and the sequential copy alone.

    python tools/bench_staging.py SLIDES FOLDER              from a disk of 50 MB/s and 5 ms per read
    python tools/bench_staging.py SLIDES FOLDER --mb 100 --ms 2 --repeats 3

SLIDES is a folder of slides on a local disk. It is mounted below FOLDER by FUSE, and each read waits: the latency
counts for each read of a program, the bandwidth for all reads together, as on a network. The kernel divides a large
read into requests of 128 kB; only the first of them waits. With --cache, the kernel caches pages and reads ahead, as an
NFS client does: then the latency counts for each request. The mount is new for each run. Needs root, libfuse2 (`apt-get install libfuse2`) and `pip install fusepy`, which are not
dependencies of histopipe.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("histopipe"))
SPEEDUP, OF_COPY = 5.0, 1.2
"""The staged ingest should be this many times as fast as in place, and take at most this many times the copy."""
_REQUEST = 128 << 10
_STAT = ("st_mode", "st_size", "st_mtime", "st_atime", "st_ctime", "st_nlink", "st_uid", "st_gid")


def serve(source: Path, mount: Path, mb: float, ms: float, *, cache: bool) -> None:
    """Serve a folder as a slow, read-only filesystem until it is unmounted."""
    import fuse  # late: only this process needs it

    lock = threading.Lock()
    free = [0.0]
    ends: dict[int, int] = {}  # by open file: where a large read continues

    class SlowDisk(fuse.Operations):  # type: ignore[misc]
        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            status = Path(f"{source}{path}").stat()
            return {name: getattr(status, name) for name in _STAT}

        def readdir(self, path: str, fh: Any) -> list[str]:
            return [".", "..", *(entry.name for entry in Path(f"{source}{path}").iterdir())]

        def open(self, path: str, flags: int) -> int:
            return os.open(f"{source}{path}", os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            data = os.pread(fh, size, offset)
            continues = not cache and ends.get(fh) == offset
            ends[fh] = offset + size if size == _REQUEST else -1
            with lock:  # one wire for all reads
                start = max(free[0], time.monotonic())
                free[0] = start + len(data) / (mb * 1e6)
                until = free[0] + (0.0 if continues else ms / 1000)
            time.sleep(max(0.0, until - time.monotonic()))
            return data

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

    fuse.FUSE(SlowDisk(), str(mount), foreground=True, ro=True, direct_io=not cache)


@contextmanager
def mounted(source: Path, folder: Path, *options: str) -> Iterator[Path]:
    """Mount a slow disk with the files of a folder, with an empty cache."""
    mount = folder / "slow"
    mount.mkdir()
    process = subprocess.Popen(
        [
            sys.executable,
            __file__,
            "--serve",
            str(source),
            str(mount),
            *options,
        ]
    )
    try:
        while not mount.is_mount():
            time.sleep(0.1)
            if process.poll() is not None:
                raise SystemExit("the slow disk could not be mounted: see above")
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=False)  # noqa: S607 - a program of the machine
        process.wait()
        mount.rmdir()


def timed(command: list[object]) -> float:
    """Return the seconds of a command."""
    started = time.monotonic()
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return time.monotonic() - started


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("slides", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mb", type=float, default=50.0)
    parser.add_argument("--ms", type=float, default=5.0)
    parser.add_argument("--cache", action="store_true")
    parser.add_argument(
        "--route", default="auto", help="route of the patches; see histopipe ingest"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.slides, arguments.folder, arguments.mb, arguments.ms, cache=arguments.cache)
        return
    options = [
        "--mb",
        str(arguments.mb),
        "--ms",
        str(arguments.ms),
        *(["--cache"] if arguments.cache else []),
    ]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    out = arguments.folder / "store.lmdb"
    ingest: list[object] = [
        COMMAND,
        "ingest",
        arguments.folder / "slow",
        "--out",
        out,
        "--route",
        arguments.route,
    ]
    commands: dict[str, list[object]] = {
        "sequential copy": ["cp", "-rL", arguments.folder / "slow", arguments.folder / "copy"],
        "staged": [*ingest, "--stage", arguments.folder / "stage"],
        "in place": ingest,
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(arguments.repeats):
        for name, command in commands.items():
            with mounted(arguments.slides, arguments.folder, *options):
                seconds[name].append(timed(command))
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(arguments.folder / "copy", ignore_errors=True)
            print(f"{name:<16} {seconds[name][-1]:7.1f} s", flush=True)
    copy, staged, plain = (statistics.median(times) for times in seconds.values())
    print(f"staged: {plain / staged:.1f} times as fast as in place (aim {SPEEDUP:g})")
    print(f"staged: {staged / copy:.2f} of the sequential copy (aim at most {OF_COPY:g})")


if __name__ == "__main__":
    main()
