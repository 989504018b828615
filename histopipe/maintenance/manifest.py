"""Manifest of a store in object storage: its files, and the blocks of which they consist."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, NothingToDo, RemoteMissing, UnknownVersion, UsageError
from histopipe.system.files import path_within
from histopipe.system.object_storage import read_range, remote_file, write_file
from histopipe.system.urls import is_url, is_web, public_url

MANIFEST = "histopipe-store.json"
"""Name of the manifest below the URL of a store. It is written last."""
BLOCKS = "blocks"
"""Prefix of the blocks. Each has the name of its SHA-256."""
_VERSION = 1
_SHA256 = re.compile("[0-9a-f]{64}")
_LARGEST = 1 << 30


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a store: its path in the store's folder, its size, and the SHA-256 of each of its blocks."""

    name: str
    size_bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a store, in blocks of `block_bytes`; the last block of a file may be shorter."""

    uuid: str
    block_bytes: int
    files: tuple[StoredFile, ...]

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

    def write(self, url: str) -> None:
        """Write the manifest of the store at a URL."""
        write_file(block_url(url, MANIFEST), self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1).encode()


def check_target(url: str, *, written: bool = True) -> None:
    """Check the URL of a store.

    Raises:
        UsageError: it is no URL, or that of a web server, which takes no files.
    """
    if not is_url(url):
        raise UsageError(
            f"{url} is no URL", expected="a URL such as s3://bucket/patches.lmdb", todo="for a local copy, use cp -r"
        )  # fmt: skip
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
            f"no store at {public_url(url)}", expected=f"the file {MANIFEST}, written by `histopipe push`",
            todo="check the URL",
        ) from None  # fmt: skip
    return manifest_of(read_range(file, 0, min(file.size_bytes, _LARGEST)), public_url(where))


def manifest_of(content: bytes, where: str) -> Manifest:
    """Return the manifest in a JSON text. It is untrusted input; `where` is for messages.

    Raises:
        DamagedStore, UnknownVersion: it is damaged, or of a later version.
    """
    try:
        value = json.loads(content)
        version = value["version"]
        if version == _VERSION:
            return _checked(value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DamagedStore(f"{where} is damaged", found=repr(error)[:200]) from error
    raise UnknownVersion(f"{where} has version {str(version)[:80]}", expected=f"version {_VERSION}")


def _checked(value: Mapping[str, Any]) -> Manifest:
    """Return a manifest if it is consistent; raise ValueError, KeyError or TypeError if not."""
    files = tuple(
        StoredFile(str(entry["name"]), int(entry["size_bytes"]), tuple(map(str, entry["blocks"])))
        for entry in value["files"]
    )
    manifest = Manifest(str(value["uuid"]), int(value["block_bytes"]), files)
    if not 0 < manifest.block_bytes <= _LARGEST:
        raise ValueError(f"blocks of {manifest.block_bytes} bytes")
    if not files or len({file.name for file in files}) < len(files):
        raise ValueError("no files, or two files of one name")
    for file in files:
        path_within(Path("store"), file.name)
        if file.size_bytes < 0 or len(manifest.places(file)) != len(file.blocks):
            raise ValueError(f"{file.name}: size and blocks do not match")
        if not all(map(_SHA256.fullmatch, file.blocks)):
            raise ValueError(f"{file.name}: the name of a block is no SHA-256")
    return manifest
