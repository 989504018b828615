"""Copy a store to object storage: `push`.

A store is cut into blocks that are named after their SHA-256. So an interrupted transfer continues where it ended, and
a changed store sends only what is new. The manifest is written last: until then, the earlier version stays valid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from histopipe.errors import DamagedStore, NothingToDo, RemoteMissing, UsageError
from histopipe.maintenance.manifest import (
    BLOCKS,
    Manifest,
    StoredFile,
    block_url,
    check_target,
    read_manifest,
)
from histopipe.store.catalog import read_catalog
from histopipe.store.store import Store
from histopipe.system.object_storage import delete_file, list_files, parallel, write_file
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result, counted
from histopipe.system.urls import public_url

_NOT_COPIED = ("lock.mdb", "ingest.lock")
"""Files that are only valid on one machine; LMDB and histopipe create them."""


@dataclass(frozen=True, slots=True, repr=False)
class PushResult(Result):
    """Result of `push`.

    Attributes:
        url: where the store is.
        size_bytes: size of the store.
        sent_bytes: size of the blocks that were sent; the others were there already.
    """

    url: str
    size_bytes: int
    sent_bytes: int

    def __str__(self) -> str:
        return f"{self.url}: {self.size_bytes / 1e6:,.1f} MB, of which {self.sent_bytes / 1e6:,.1f} MB were sent"


def push(
    store: str | Path, url: str, *, block_mb: float = 32.0, progress: Progress | None = None
) -> PushResult:
    """Copy a store to object storage.

    The same call continues after an interruption, and sends only what has changed since an earlier `push`.

    Args:
        store: a store, or a folder of parts. It must not be written at the same time.
        url: where to write it, such as "s3://bucket/patches.lmdb".
        block_mb: size of the blocks in MB.
        progress: shows the progress; `default_progress()` if None.

    Returns:
        The size of the store and of what was sent.

    Raises:
        UsageError: the URL holds another store, or the store was written during the transfer.
        NothingToDo, DamagedStore: there is no store, or it cannot be read.
        RemoteRefused, RemoteError: the URL cannot be written.

    Example:
        >>> push("patches.lmdb", "s3://bucket/patches.lmdb")  # doctest: +SKIP
    """
    folder, progress = Path(store), progress or default_progress()
    check_target(url)
    if not 0.001 <= block_mb <= 1000:
        raise UsageError("--block-mb", found=block_mb, expected="from 0.001 to 1000")
    identity = _uuid(folder)
    before: Manifest | None = None
    with suppress(NothingToDo):
        before = read_manifest(url)
    if before is not None and before.uuid != identity:
        raise UsageError(
            f"{public_url(url)} holds another store", found=before.uuid, expected=identity,
            todo="choose another URL, or delete it",
        )  # fmt: skip
    there = _blocks_at(url)
    paths = [path for path in sorted(folder.rglob("*")) if _is_copied(path)]
    states = [_state(path) for path in paths]
    size = int(block_mb * 1e6)
    with progress.bar("push", unit="bytes", total=sum(length for length, _ in states)) as bar:
        sending = _Sending(url, there, size, bar.advance)
        files = [
            StoredFile(path.relative_to(folder).as_posix(), length, sending.send(path, length))
            for path, (length, _) in zip(paths, states, strict=True)
        ]
    if [_state(path) for path in paths] != states:
        raise UsageError(
            f"{folder} was written during the transfer", todo="run the same command again when nothing writes to it"
        )  # fmt: skip
    manifest = Manifest(identity, size, tuple(files))
    missing = manifest.blocks.items() - _blocks_at(url).items()
    if missing:
        raise DamagedStore(
            f"{public_url(url)}: {counted(len(missing), 'block')} missing or of another size after the transfer",
            todo="run the same command again",
        )  # fmt: skip
    manifest.write(url)
    parallel(lambda sha: delete_file(block_url(url, sha)), there.keys() - manifest.blocks.keys())
    return PushResult(public_url(url), manifest.size_bytes, sending.sent_bytes)


@dataclass(slots=True)
class _Sending:
    """Writes the blocks of files to a URL, apart from those that are `there`."""

    url: str
    there: Mapping[str, int]
    block_bytes: int
    advance: Callable[[int], object]
    sent_bytes: int = 0

    def send(self, path: Path, length: int) -> tuple[str, ...]:
        """Send the blocks of a file, and return the SHA-256 of each."""
        sent = parallel(partial(self._send_block, path), range(0, length, self.block_bytes))
        self.sent_bytes += sum(count for _, count in sent)
        return tuple(sha for sha, _ in sent)

    def _send_block(self, path: Path, start: int) -> tuple[str, int]:
        with path.open("rb") as file:
            file.seek(start)
            block = file.read(self.block_bytes)
        sha = hashlib.sha256(block).hexdigest()
        present = self.there.get(sha) == len(block)
        if not present:
            write_file(block_url(self.url, sha), block)
        self.advance(len(block))
        return sha, 0 if present else len(block)


def _uuid(folder: Path) -> str:
    """Return the id of a store or of a folder of parts.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be read.
    """
    catalog = None if (folder / "data.mdb").exists() else read_catalog(folder)
    if catalog is not None:
        return catalog.uuid
    with Store(folder) as store:
        return store.uuid


def _is_copied(path: Path) -> bool:
    return path.is_file() and path.name not in _NOT_COPIED and not path.name.startswith(".")


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _blocks_at(url: str) -> dict[str, int]:
    """Return the size of each block at a URL, by its name."""
    prefix = f"{url.rstrip('/')}/{BLOCKS}/"
    with suppress(RemoteMissing):
        return {file.url.rpartition("/")[2]: file.size_bytes for file in list_files(prefix)}
    return {}
