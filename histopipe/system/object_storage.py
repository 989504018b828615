"""Files in object storage and on web servers, through fsspec: list, check, read, download and write them.

Credentials come only from the environment of fsspec's libraries.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from histopipe.errors import RemoteError, RemoteMissing, RemoteRefused, UsageError
from histopipe.system.files import is_full_disk
from histopipe.system.urls import is_web, public_url, without_secrets

T = TypeVar("T")

_TRIES = 6
"""The libraries' retries are switched off where they have some: those of several layers would multiply."""
_FIRST_WAIT_SECONDS = 0.3
"""Wait after the first failure. It doubles with each failure: 10 to 20 s for all six tries."""
_WAITABLE = (408, 425, 429)
"""HTTP status codes from 400 to 499 that another try may resolve: timeout, too early, too many requests."""
_PERMANENT = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
}


def try_action(url: str, action: Callable[[], T], done: str = "read") -> T:
    """Call a function, several times if it fails for a reason that may pass. `done` is what it does with the URL.

    Raises:
        RemoteRefused: it failed for a reason that stays, such as a missing permission.
        RemoteError: it failed each time.
    """
    tries = 0
    while True:
        try:
            return action()
        # Broad: the libraries of each storage raise their own types, of which most have no common base.
        except Exception as error:
            if isinstance(error, RemoteError | MemoryError) or is_full_disk(error):
                raise
            tries += 1
            reason, kind = _reason(error)
            may_pass = kind is RemoteError
            if tries == _TRIES or not may_pass:
                raise kind(
                    f"{public_url(url)} cannot be {done}",
                    found=f"{reason} (tried {_TRIES} times)" if may_pass else reason,
                    todo="check the connection, and run the same command again"
                    if may_pass
                    else "check the URL and your credentials",
                ) from None
        time.sleep(_FIRST_WAIT_SECONDS * 2 ** (tries - 1) * random.uniform(0.7, 1.3))  # noqa: S311


def _reason(error: BaseException) -> tuple[str, type[RemoteError]]:
    """Return the reason of a failure without secrets, and the error to raise."""
    status = next(filter(None, map(_status, _causes(error))), None)
    names = {type(cause).__name__ for cause in _causes(error)}
    permanent = isinstance(error, PermissionError | IsADirectoryError) or bool(names & _PERMANENT)
    if status is not None:
        permanent = 400 <= status < 500 and status not in _WAITABLE
        with suppress(ValueError):
            reason = f"{status} {HTTPStatus(status).phrase}"
            kind = RemoteMissing if status == HTTPStatus.NOT_FOUND else RemoteRefused
            return reason, kind if permanent else RemoteError
    if isinstance(error, FileNotFoundError):
        if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError):
            return "no such file", RemoteMissing
        error = error.__cause__  # fsspec also raises this error if a server cannot be reached
    text = without_secrets(str(error)) or type(error).__name__
    return text[:300], RemoteRefused if permanent else RemoteError


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status code of an error of aiohttp, botocore, gcsfs or Azure; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status
    # Of gcsfs only: aiohttp's errors about a broken answer have the code 400.
    code = ("code",) if type(error).__module__.startswith("gcsfs") else ()
    values = (getattr(error, name, None) for name in ("status", "status_code", *code))
    return next((n for n in values if isinstance(n, int) and 300 <= n < 600), None)


_CONNECT_SECONDS, _READ_SECONDS = 15.0, 60.0
"""Time limits for a connection, and for each read of it: without them, a connection that sends nothing blocks a run."""
_WEB = ("http", "https")
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retries": {"max_attempts": 0},
        }
    },
    "file": {"auto_mkdir": True},
}
"""Options of fsspec's filesystems, by scheme."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file behind a URL. `mtime_ns` is 0 and `etag` None if the server does not report them.

    `md5` is the hexadecimal MD5 of the content; None if unknown. `ranges` is false if the server can send only the
    whole file.
    """

    url: str = field(repr=False)
    size_bytes: int
    mtime_ns: int = 0
    etag: str | None = None
    md5: str | None = None
    ranges: bool = True

    @property
    def location(self) -> str:
        """The URL without secrets."""
        return public_url(self.url)


def list_files(url: str) -> list[RemoteFile]:
    """Return the file behind a URL, or all files under a prefix, sorted by URL.

    Raises:
        RemoteRefused: the URL does not exist, or the access is denied.
        RemoteError: the server cannot be reached.
        UsageError: the scheme is unknown, or its library is not installed.
    """
    system, path = filesystem(url)
    if is_web(url):
        return [remote_file(url)]
    scheme = url.partition("://")[0]
    files = try_action(url, lambda: system.find(path, detail=True) or {path: system.info(path)})
    return [_described(f"{scheme}://{name}", info) for name, info in sorted(files.items())]


def remote_file(url: str) -> RemoteFile:
    """Return the current size, time and checksum of one file.

    Raises:
        RemoteRefused, RemoteError, UsageError: as `list_files`.
    """
    system, path = filesystem(url)
    read = partial(system.info, path)
    if url.startswith("s3://"):
        bucket, key, _ = system.split_path(path)
        read = partial(system.call_s3, "head_object", Bucket=bucket, Key=key)
    return _described(url, try_action(url, read))


def read_range(url: str, start: int, stop: int) -> bytes:
    """Return some bytes of a file.

    Raises:
        RemoteRefused, RemoteError: they cannot be read.
    """
    system, path = filesystem(url)

    def read() -> bytes:
        data: bytes = system.cat_file(path, start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(f"{len(data):,} bytes received, {stop - start:,} expected")
        return data

    return try_action(url, read)


def open_remote(url: str) -> BinaryIO:
    """Open a file for reading a few parts of it, such as its header.

    Raises:
        RemoteRefused, RemoteError: it cannot be opened.
    """
    system, path = filesystem(url)
    opened: BinaryIO = try_action(url, lambda: system.open(path, "rb", block_size=1 << 16))
    return opened


def write_file(url: str, file: Path) -> None:
    """Write a local file of any size to a URL. Check the size of the written file.

    Raises:
        RemoteRefused: the access is denied, or the server takes no files.
        RemoteError: it cannot be written.
    """
    system, path = filesystem(url)

    def write() -> None:
        system.put_file(str(file), path)
        if remote_file(url).size_bytes != file.stat().st_size:
            raise OSError("the file differs from what was sent")

    try_action(url, write, "written")


PART_BYTES = 8 << 20
"""Bytes per request. A part whose connection breaks is requested again, the others are kept."""
_DOWNLOADS = 8
"""Number of parts that are received at once: one connection is often slower than the network."""


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
    stop = stop or threading.Event()

    def fetch(start: int) -> None:
        if not stop.is_set():
            data = read_range(file.url, start, min(start + PART_BYTES, file.size_bytes))
            with path.open("r+b") as part:
                part.seek(start)
                part.write(data)
            advance(len(data))

    with path.open("xb") as out:
        if file.size_bytes:
            os.posix_fallocate(out.fileno(), 0, file.size_bytes)  # a full disk shows at once
    if file.ranges:
        with ThreadPoolExecutor(_DOWNLOADS, "histopipe-download") as pool:
            list(pool.map(fetch, range(0, file.size_bytes, PART_BYTES)))  # raises the first error
    else:
        _download_stream(file, path, stop)
        advance(file.size_bytes)
    if stop.is_set():
        raise RemoteError(f"{file.location}: the download was stopped")
    _check_download(file, path)


def _download_stream(file: RemoteFile, path: Path, stop: threading.Event) -> None:
    """Download a file from a server without range requests: from its start, again after each failure."""
    system, source = filesystem(file.url)

    def read() -> None:
        with system.open(source, "rb", block_size=0) as stream, path.open("r+b") as out:
            while not stop.is_set() and (data := stream.read(PART_BYTES)):
                out.write(data)
            received = out.truncate()  # an earlier try may have written more
            if received != file.size_bytes and not stop.is_set():
                raise OSError(f"{received:,} bytes received, {file.size_bytes:,} expected")

    try_action(file.url, read)


def _check_download(file: RemoteFile, path: Path) -> None:
    """Check the size, version and MD5 of a downloaded file.

    Raises:
        RemoteError: one of them differs.
    """
    now = remote_file(file.url)
    # Listings and single requests may differ in fractions of a second.
    times = now.mtime_ns // 10**9, file.mtime_ns // 10**9
    etags = now.etag, file.etag
    same = times[0] == times[1] or 0 in times if None in etags else etags[0] == etags[1]
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


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's filesystem of a URL, and the path in it.

    Raises:
        UsageError: the scheme is unknown, or its library is not installed.
    """
    scheme = url.partition("://")[0].lower()
    system = _filesystem_of(scheme)
    return system, url if scheme in _WEB else str(system._strip_protocol(url))


@cache
def _filesystem_of(scheme: str) -> Any:
    try:
        import fsspec  # late: an extra

        options = {**_OPTIONS.get(scheme, {})}
        if scheme in _WEB:
            import aiohttp  # late: as above

            # The default is five minutes for a whole file, and none for a connection that sends nothing.
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
            )
            options["client_kwargs"] = {"timeout": timeout}
        system = fsspec.filesystem(
            scheme, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except ImportError as error:
        raise UsageError(
            f"URLs of the kind {scheme}:// need further libraries",
            found="fsspec is not installed" if error.name == "fsspec" else str(error),
            todo="install them with pip install 'histopipe[remote]'",
        ) from error
    except ValueError as error:
        if scheme in fsspec.available_protocols():
            raise UsageError(
                f"{scheme}:// cannot be used",
                found=without_secrets(str(error))[:200],
                todo="set the credentials in the environment",
            ) from None
        raise UsageError(
            f"{scheme}:// is an unknown kind of URL",
            expected="s3://, gs://, az://, https:// or http://",
        ) from error
    if scheme == "s3":
        system.retries = 1  # no option; `try_action` tries again
    return system


def _described(url: str, info: Mapping[str, Any]) -> RemoteFile:
    """Return a file from what fsspec or the storage reports about it."""
    size = info.get("size", info.get("ContentLength"))
    if size is None:
        raise RemoteRefused(
            f"{public_url(url)} cannot be used",
            found="the server does not report the size of the file",
        )
    etag = info.get("ETag") or info.get("etag")
    times = (info.get(name) for name in ("LastModified", "last_modified", "mtime", "Last-Modified"))
    return RemoteFile(
        url,
        int(size),
        next((_nanoseconds(moment) for moment in times if moment), 0),
        None if etag is None else str(etag).strip('"'),
        _md5(url, info),
        info.get("partial", True),
    )


def _nanoseconds(moment: Any) -> int:
    if isinstance(moment, datetime):
        return int(moment.timestamp() * 1e9) // 1000 * 1000
    if isinstance(moment, str):
        parts = email.utils.parsedate_tz(moment)
        return email.utils.mktime_tz(parts) * 10**9 if parts else 0
    return int(float(moment) * 1e9)


def _md5(url: str, info: Mapping[str, Any]) -> str | None:
    """Return the hexadecimal MD5 of the content, where the storage reports one."""
    if url.startswith("s3://"):
        etag = str(info.get("ETag", "")).strip('"')
        # The ETag is no MD5 for objects of several parts, with a customer's key, or in a directory bucket.
        encrypted = info.get("ServerSideEncryption") not in (None, "AES256") or info.get(
            "SSECustomerAlgorithm"
        )
        plain = "ContentLength" in info and not encrypted and "--x-s3/" not in url
        return etag if plain and re.fullmatch("[0-9a-f]{32}", etag) else None
    digest = info.get("md5Hash") or info.get("Content-MD5")
    if isinstance(settings := info.get("content_settings"), Mapping):
        digest = settings.get("content_md5")
    if isinstance(digest, str):
        with suppress(ValueError):
            digest = base64.b64decode(digest, validate=True)
    return digest.hex() if isinstance(digest, bytes | bytearray) and len(digest) == 16 else None
