"""Copy a store from object storage to a local disk, and verify it: `pull`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from histopipe.errors import DamagedStore, ExitCode, MachineShort, RemoteError, UsageError
from histopipe.maintenance.manifest import Manifest, block_url, check_target, read_manifest
from histopipe.maintenance.verify import verify
from histopipe.store.catalog import parts_of
from histopipe.system.download import write_at
from histopipe.system.files import locked, shortened
from histopipe.system.filesystems import roomy
from histopipe.system.object_storage import RemoteFile, parallel, read_range
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result, counted
from histopipe.system.urls import public_url

_TRIES = 3
"""Number of downloads of a block with a wrong checksum."""


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
        with roomy(target.parent, then), locked(part) as free:
            if not free:
                raise UsageError(f"another process pulls into {target}", todo="wait until it ends")
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
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.truncate(descriptor, file.size_bytes)
                if file.size_bytes:
                    os.posix_fallocate(descriptor, 0, file.size_bytes)
                receive = partial(_receive, url, descriptor, bar.advance)
                received += sum(parallel(receive, manifest.places(file)))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    return received


def _receive(
    url: str, descriptor: int, advance: Callable[[int], object], place: tuple[int, str, int]
) -> int:
    """Write one block to its place in a file, unless it is there. Return the number of bytes received."""
    start, sha, size = place
    if hashlib.sha256(os.pread(descriptor, size, start)).hexdigest() == sha:
        advance(size)
        return 0
    where = block_url(url, sha)
    for _ in range(_TRIES):
        block = read_range(RemoteFile(where, size), 0, size)
        actual = hashlib.sha256(block).hexdigest()
        if actual == sha:
            write_at(descriptor, block, start)
            advance(size)
            return size
    raise DamagedStore(
        f"{public_url(where)} does not match its checksum", found=f"SHA-256 {actual}", expected=sha,
        todo="delete this block, and push the store again from an intact copy",
    )  # fmt: skip
