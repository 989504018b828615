"""Manifest of a store in object storage: its files, and the blocks of which they consist."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from histopipe.errors import (
    DamagedStore,
    ExitCode,
    MachineShort,
    NothingToDo,
    RemoteError,
    RemoteMissing,
    UnknownVersion,
    UsageError,
)
from histopipe.maintenance.verify import verify
from histopipe.store.catalog import parts_of, read_catalog
from histopipe.store.store import Store
from histopipe.system.files import FolderKind, flush_to_disk, folder_kind, path_within, shortened
from histopipe.system.filesystems import roomy
from histopipe.system.locks import locked_alone
from histopipe.system.object_storage import (
    delete_file,
    list_files,
    parallel,
    read_range,
    remote_file,
    write_at,
    write_file,
)
from histopipe.system.output import Progress, Result, counted, default_progress
from histopipe.system.urls import is_url, is_web, public_url

MANIFEST = "histopipe-store.json"
"""Name of the manifest below the URL of a store. It is written last."""
BLOCKS = "blocks"
"""Prefix of the blocks. Each has the name of its SHA-256."""
_VERSION = 1
_SHA256 = re.compile("[0-9a-f]{64}")
_LARGEST = 1 << 30
"""Most bytes of a manifest and of a block, which are untrusted and read into memory: 1 GiB holds a manifest of 400 TB."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a store: its path in the store's folder, its size, and the SHA-256 of each of its blocks."""

    name: str
    size_bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a store, in blocks of `block_bytes`; the last block of a file may be shorter.

    Raises:
        ValueError: the values do not fit together. They may be untrusted.
    """

    uuid: str
    block_bytes: int
    files: tuple[StoredFile, ...]

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes <= _LARGEST:
            raise ValueError(f"blocks of {self.block_bytes} bytes")
        if not self.files or len({file.name for file in self.files}) < len(self.files):
            raise ValueError("no files, or two files of one name")
        for file in self.files:
            path_within(Path("store"), file.name)
            blocks = -(-file.size_bytes // self.block_bytes)
            if file.size_bytes < 0 or len(file.blocks) != blocks:
                raise ValueError(f"{file.name}: size and blocks do not match")
            if not all(map(_SHA256.fullmatch, file.blocks)):
                raise ValueError(f"{file.name}: the name of a block is no SHA-256")

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def blocks(self) -> dict[str, int]:
        """Size of each block by its SHA-256."""
        return {sha: size for file in self.files for _, sha, size in self.places(file)}

    def places(self, file: StoredFile) -> list[tuple[int, str, int]]:
        """Return offset, SHA-256 and size of each block of a file."""
        starts = range(0, file.size_bytes, self.block_bytes)
        sizes = (min(self.block_bytes, file.size_bytes - start) for start in starts)
        return list(zip(starts, file.blocks, sizes, strict=True))


def check_target(url: str, *, written: bool = True) -> None:
    """Check the URL of a store.

    Raises:
        UsageError: it is no URL, or that of a web server, which takes no files.
    """
    if not is_url(url):
        raise UsageError(
            f"{url} is no URL",
            expected="a URL such as s3://bucket/patches.lmdb",
            todo="for a local copy, use cp -r",
        )
    if written and is_web(url):
        raise UsageError(f"{public_url(url)} is a web server", expected="s3://, gs:// or az://")


def block_url(url: str, name: str) -> str:
    """Return the URL of the manifest, or of a block."""
    return f"{url.rstrip('/')}/{name if name == MANIFEST else f'{BLOCKS}/{name}'}"


def read_manifest(url: str) -> Manifest:
    """Read and check the manifest of the store at a URL. It is untrusted input.

    Raises:
        NothingToDo: there is no store.
        DamagedStore, UnknownVersion: the manifest is damaged, or of a later version.
        RemoteRefused, RemoteError: it cannot be read.
    """
    where = block_url(url, MANIFEST)
    try:
        file = remote_file(where)
    except RemoteMissing:
        raise NothingToDo(
            f"no store at {public_url(url)}",
            expected=f"the file {MANIFEST}, written by `histopipe push`",
            todo="check the URL",
        ) from None
    return manifest_of(read_range(where, 0, min(file.size_bytes, _LARGEST)), public_url(where))


def manifest_of(content: bytes, where: str) -> Manifest:
    """Return the manifest in a JSON text. It is untrusted input; `where` is for messages.

    Raises:
        DamagedStore, UnknownVersion: it is damaged, or of a later version.
    """
    try:
        value = json.loads(content)
        version = value["version"]
        if version == _VERSION:
            files = (
                StoredFile(
                    str(entry["name"]), int(entry["size_bytes"]), tuple(map(str, entry["blocks"]))
                )
                for entry in value["files"]
            )
            return Manifest(str(value["uuid"]), int(value["block_bytes"]), tuple(files))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedStore(f"{where} is damaged", found=repr(error)[:200]) from error
    raise UnknownVersion(f"{where} has version {str(version)[:80]}", expected=f"version {_VERSION}")


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
    with suppress(NothingToDo):
        before = read_manifest(url).uuid
        if before != identity:
            raise UsageError(
                f"{public_url(url)} holds another store",
                found=before,
                expected=identity,
                todo="choose another URL, or delete it",
            )
    there = _blocks_at(url)
    states = {
        path: _state(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in _NOT_COPIED and not path.name.startswith(".")
    }
    size, files, sent_bytes = int(block_mb * 1e6), [], 0
    with progress.bar(
        "push", unit="bytes", total=sum(length for length, _ in states.values())
    ) as bar:
        for path, (length, _) in states.items():
            send = partial(
                _send_block, path, url=url, there=there, block_bytes=size, advance=bar.advance
            )
            sent = parallel(send, range(0, length, size))
            blocks = tuple(sha for sha, _ in sent)
            files.append(StoredFile(path.relative_to(folder).as_posix(), length, blocks))
            sent_bytes += sum(count for _, count in sent)
    if {path: _state(path) for path in states} != states:
        raise UsageError(
            f"{folder} was written during the transfer",
            todo="run the same command again when nothing writes to it",
        )
    manifest = Manifest(identity, size, tuple(files))
    missing = manifest.blocks.items() - _blocks_at(url).items()
    if missing:
        raise DamagedStore(
            f"{public_url(url)}: {counted(len(missing), 'block')} missing or of another size after the transfer",
            todo="run the same command again",
        )
    # The manifest makes the new version visible. Before, all of its blocks must be there; after it, no reader needs the
    # blocks of the earlier version.
    content = json.dumps({"version": _VERSION, **asdict(manifest)}, indent=1)
    write_file(block_url(url, MANIFEST), content.encode())
    parallel(lambda sha: delete_file(block_url(url, sha)), there.keys() - manifest.blocks.keys())
    return PushResult(public_url(url), manifest.size_bytes, sent_bytes)


def _send_block(
    path: Path,
    start: int,
    *,
    url: str,
    there: Mapping[str, int],
    block_bytes: int,
    advance: Callable[[int], object],
) -> tuple[str, int]:
    """Write a block of a file to a URL, unless it is there. Return its SHA-256, and the number of bytes sent."""
    with path.open("rb") as file:
        file.seek(start)
        block = file.read(block_bytes)
    sha = hashlib.sha256(block).hexdigest()
    advance(len(block))
    if there.get(sha) == len(block):
        return sha, 0
    write_file(block_url(url, sha), block)
    return sha, len(block)


def _uuid(folder: Path) -> str:
    """Return the id of a store or of a folder of parts.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be read.
    """
    catalog = None if folder_kind(folder) is FolderKind.STORE else read_catalog(folder)
    if catalog is not None:
        return catalog.uuid
    with Store(folder) as store:
        return store.uuid


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _blocks_at(url: str) -> dict[str, int]:
    """Return the size of each block at a URL, by its name."""
    with suppress(RemoteMissing):
        return {
            file.url.rpartition("/")[2]: file.size_bytes for file in list_files(block_url(url, ""))
        }
    return {}


@dataclass(frozen=True, slots=True, repr=False)
class PullResult(Result):
    """Result of `pull`.

    Attributes:
        store: path of the store.
        size_bytes: its size.
        received_bytes: size of the blocks that were received; the others were left by an interrupted `pull`.
        findings: damage that was found by `verify`; the store that was pushed has it, too.
    """

    store: str
    size_bytes: int
    received_bytes: int
    findings: list[str]

    @property
    def exit_code(self) -> ExitCode:
        """0 if the store is intact, 5 if it is damaged."""
        return ExitCode.DAMAGED if self.findings else ExitCode.DONE

    def __str__(self) -> str:
        state = f"{counted(len(self.findings), 'finding')}" if self.findings else "verified"
        return (
            f"{self.store}: {self.size_bytes / 1e6:,.1f} MB, of which {self.received_bytes / 1e6:,.1f} MB were "
            f"received; {state}"
        )


def pull(url: str, out: str | Path, *, progress: Progress | None = None) -> PullResult:
    """Copy a store from object storage to a local disk, and verify it.

    The same call continues after an interruption.

    Args:
        url: URL of a store that `push` has written.
        out: path of the new store.
        progress: shows the progress; `default_progress()` if None.

    Returns:
        The size of the store and of what was received, and what `verify` has found.

    Raises:
        UsageError: `out` exists or cannot be written, or another process pulls into it.
        NothingToDo: there is no store at the URL.
        DamagedStore: a block does not match its checksum.
        RemoteRefused, RemoteError: the URL cannot be read.
        MachineShort: the disk is full.

    Example:
        >>> pull("s3://bucket/patches.lmdb", "patches.lmdb")  # doctest: +SKIP
    """
    target, progress = Path(out), progress or default_progress()
    check_target(url, written=False)
    if target.exists():
        raise UsageError(f"{target} exists", todo="choose another path, or remove it")
    manifest = read_manifest(url)
    then = f"run the same command again: the store has {manifest.size_bytes / 1e6:,.0f} MB"
    part = target.with_name(shortened(f".part-{target.name}"))
    try:
        part.mkdir(parents=True, exist_ok=True)
        in_use = f"another process pulls into {target}"
        with roomy(target.parent, then), locked_alone(part, in_use, "wait until it ends"):
            received = _receive_all(manifest, url, part, progress)
            part.rename(target)
    except (RemoteError, MachineShort):
        raise
    except OSError as error:
        raise UsageError(f"cannot create or write to {target}", found=str(error)) from error
    findings = [
        finding.what
        for path in parts_of(target)
        for finding in verify(path, progress=progress).findings
    ]
    return PullResult(str(target), manifest.size_bytes, received, findings)


def _receive_all(manifest: Manifest, url: str, folder: Path, progress: Progress) -> int:
    """Write all files of a store into a folder; return the number of bytes received."""
    names = {file.name for file in manifest.files}
    for path in folder.rglob("*"):  # an earlier version of the store may have had other files
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()
    received = 0
    with progress.bar("pull", unit="bytes", total=manifest.size_bytes) as bar:
        for file in manifest.files:
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as part:
                part.truncate(file.size_bytes)
                if file.size_bytes:
                    os.posix_fallocate(part.fileno(), 0, file.size_bytes)
            receive = partial(_receive, url, path, bar.advance)
            received += sum(parallel(receive, manifest.places(file)))
            flush_to_disk(path)
    return received


def _receive(
    url: str, path: Path, advance: Callable[[int], object], place: tuple[int, str, int]
) -> int:
    """Write one block to its place in a file, unless it is there. Return the number of bytes received."""
    start, sha, size = place
    with path.open("rb") as file:
        file.seek(start)
        received = 0 if hashlib.sha256(file.read(size)).hexdigest() == sha else size
    if received:
        write_at(path, _read_block(block_url(url, sha), sha, size), start)
    advance(size)
    return received


def _read_block(where: str, sha: str, size: int) -> bytes:
    """Return a block whose SHA-256 is right. Read it again if it is not: a byte may be wrong on its way only."""
    for _ in range(3):
        block = read_range(where, 0, size)
        actual = hashlib.sha256(block).hexdigest()
        if actual == sha:
            return block
    raise DamagedStore(
        f"{public_url(where)} does not match its checksum",
        found=f"SHA-256 {actual}",
        expected=sha,
        todo="delete this block, and push the store again from an intact copy",
    )
