"""Find the pages of an LMDB file by kind, without LMDB, for tests that damage them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from helpers.stores import patched

PAGE = 4096
_NONE = (1 << 64) - 1


@dataclass(slots=True)
class Pages:
    """Page numbers by kind and database. Overflow pages are first page and count."""

    roots: dict[str, int] = field(default_factory=dict)
    branches: dict[str, list[int]] = field(default_factory=dict)
    leaves: dict[str, list[int]] = field(default_factory=dict)
    overflow: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def pages_of(store: Path) -> Pages:
    """Walk the trees of all databases of an intact file."""
    data = (store / "data.mdb").read_bytes()
    newest = max((0, 1), key=lambda page: struct.unpack_from("<Q", data, PAGE * page + 144)[0])
    pages = Pages()
    for name, offset in (("free", 40), ("main", 88)):
        root = struct.unpack_from("<Q", data, PAGE * newest + offset + 40)[0]
        _walk(data, name, root, pages)
    for name, root in list(pages.roots.items()):
        if name not in ("free", "main"):
            _walk(data, name, root, pages)
    return pages


def _walk(data: bytes, name: str, root: int, pages: Pages) -> None:
    pages.roots[name] = root
    branches = pages.branches.setdefault(name, [])
    leaves = pages.leaves.setdefault(name, [])
    overflow = pages.overflow.setdefault(name, [])
    todo = [root] if root != _NONE else []
    while todo:
        page = todo.pop()
        is_branch = struct.unpack_from("<H", data, PAGE * page + 10)[0] & 1
        (branches if is_branch else leaves).append(page)
        for offset in nodes_of(data, page):
            low, high, flags, size = struct.unpack_from("<HHHH", data, offset)
            length, body = low | high << 16, offset + 8 + size
            if is_branch:
                todo.append(length | flags << 32)
            elif flags & 1:
                first = struct.unpack_from("<Q", data, body)[0]
                overflow.append((first, (15 + length) // PAGE + 1))
            elif flags & 2:
                pages.roots[data[offset + 8 : body].decode()] = struct.unpack_from(
                    "<Q", data, body + 40
                )[0]
    leaves.sort()


def nodes_of(data: bytes, page: int) -> Iterator[int]:
    """Yield the file offsets of the nodes of a page."""
    (lower,) = struct.unpack_from("<H", data, PAGE * page + 12)
    for start in struct.unpack_from(f"<{(lower - 16) // 2}H", data, PAGE * page + 16):
        yield PAGE * page + start


def damage_page(store: Path, page: int) -> None:
    """Give a page the flags of an overflow page."""
    patched(store / "data.mdb", PAGE * page + 10, 4)
