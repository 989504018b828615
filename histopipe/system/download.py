"""Download files in parallel parts, and check them."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from histopipe.errors import RemoteError
from histopipe.system.object_storage import (
    RemoteFile,
    filesystem,
    parallel,
    read_range,
    remote_file,
    try_action,
)

PART_BYTES = 8 << 20
"""Bytes per request. A part whose connection breaks is requested again, the others are kept."""
_THREADS = 8


def download(
    file: RemoteFile,
    path: Path,
    *,
    stop: threading.Event | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Download a file in parallel parts, and check its size, version and MD5. `path` must not exist.

    `advance` is called with the number of bytes of each part. After an error, `path` may be incomplete.

    Raises:
        RemoteRefused: the access is denied, or the file does not exist.
        RemoteError: it cannot be read, changed during the download, or has another MD5; or `stop` was set.
        OSError: `path` cannot be written, for example because the disk is full.
    """
    with path.open("xb", buffering=0) as out:
        if file.size_bytes:
            os.posix_fallocate(out.fileno(), 0, file.size_bytes)
        fetch = _download_parts if file.ranges else _download_stream
        fetch(file, out.fileno(), stop or threading.Event(), advance)
    _check_download(file, path)


def _download_parts(
    file: RemoteFile, out: int, stop: threading.Event, advance: Callable[[int], object]
) -> None:
    def fetch(start: int) -> None:
        if not stop.is_set():
            data = read_range(file, start, min(start + PART_BYTES, file.size_bytes))
            write_at(out, data, start)
            advance(len(data))

    parallel(fetch, range(0, file.size_bytes, PART_BYTES), _THREADS)
    if stop.is_set():
        raise RemoteError(f"{file.location}: the download was stopped")


def write_at(file: int, data: bytes, place: int) -> None:
    """Write all bytes at a place of an open file; one call of the kernel may write only some."""
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], place + written)


def _download_stream(
    file: RemoteFile, out: int, stop: threading.Event, advance: Callable[[int], object]
) -> None:
    """Download a file from a server without range requests: from its start, again after each failure."""
    system, path = filesystem(file.url)

    def read() -> None:
        place = 0
        with system.open(path, "rb", block_size=0) as stream:
            while data := stream.read(PART_BYTES):
                if stop.is_set():
                    raise RemoteError(f"{file.location}: the download was stopped")
                write_at(out, data, place)
                place += len(data)
        if place != file.size_bytes:
            raise OSError(f"{place:,} bytes received, {file.size_bytes:,} expected")

    try_action(file.url, read)
    advance(file.size_bytes)


def _check_download(file: RemoteFile, path: Path) -> None:
    """Check the size, version and MD5 of a downloaded file.

    Raises:
        RemoteError: one of them differs.
    """
    now = remote_file(file.url)
    if None not in (now.etag, file.etag):
        same = now.etag == file.etag
    else:  # listings and single requests may differ in fractions of a second
        times = now.mtime_ns // 10**9, file.mtime_ns // 10**9
        same = times[0] == times[1] or 0 in times
    if not same or now.size_bytes != file.size_bytes:
        raise RemoteError(
            f"{file.location} changed while it was being downloaded",
            found=f"{now.size_bytes:,} bytes, {file.size_bytes:,} before",
            todo="run the same command again",
        )
    if now.md5 is None:
        return
    with path.open("rb") as local:
        md5 = hashlib.file_digest(local, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if md5 != now.md5:
        raise RemoteError(
            f"{file.location} has another checksum after the download",
            found=f"MD5 {md5}",
            expected=now.md5,
            todo="run the same command again; if it fails again, the stored file or the network is damaged",
        )
