"""Catalog of a folder of parts: the part of each slide of a data set that several machines have ingested.

Only the process that assigns slides writes it. Two parts may contain the same slide, for example after a machine
counted as lost. The catalog then names one of them, and readers ignore the slide in the other one.
"""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.store.record import SlideRecord
from histopipe.system.files import (
    CATALOG,
    FolderKind,
    atomic_write,
    find_catalog,
    flush_to_disk,
    folder_kind,
    read_json,
)

_VERSION = 1
_SUFFIX = ".lmdb"


@dataclass(slots=True)
class Catalog:
    """Slides of a folder of parts: the file name of each slide's part, by slide id."""

    folder: Path
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    slides: dict[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> list[Path]:
        """Paths of the parts that contain slides, sorted by name."""
        return [self.folder / name for name in sorted(set(self.slides.values()))]

    def write(self) -> None:
        """Write the catalog into its folder with one rename."""
        content = {"version": _VERSION, "uuid": self.uuid, "slides": self.slides}
        with atomic_write(self.folder / CATALOG) as part:
            part.write_text(json.dumps(content, ensure_ascii=False, indent=0))
            flush_to_disk(part)


def read_catalog(folder: Path) -> Catalog | None:
    """Read the catalog of a folder; None if there is none. A `catalog.json` of another tool is ignored.

    Raises:
        DamagedStore, UnknownVersion: the catalog cannot be read, or a later version wrote it.
    """
    path = find_catalog(folder)
    if path is None:
        return None
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise DamagedStore(f"cannot read {path}", found=str(error)[:200]) from error
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        version = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise UnknownVersion(f"{path} has version {version}", expected=f"version {_VERSION}")
    identity, slides = content.get("uuid"), content.get("slides")
    if not isinstance(identity, str) or not _are_parts(slides):
        raise DamagedStore(f"{path} is damaged", expected="a uuid, and the part of each slide")
    return Catalog(folder, identity, dict(slides))


def _are_parts(slides: Any) -> TypeGuard[dict[str, str]]:
    """Check that each slide has the name of a part in the folder."""
    return isinstance(slides, dict) and all(
        isinstance(part, str) and part.endswith(_SUFFIX) and part[0] != "." and "/" not in part
        for part in set(slides.values())
    )


def no_store(path: Path) -> NothingToDo:
    """Return the error for a path that is not a store. Only commands that read data sets accept a folder of parts."""
    if folder_kind(path) is FolderKind.PARTS:
        return NothingToDo(
            f"no store at {path}",
            found="a folder of parts",
            expected="one store",
            todo="pass one of its parts, or merge them into one store with `histopipe merge`",
        )
    if any(path.glob(f"part-*{_SUFFIX}")):
        return NothingToDo(
            f"no store at {path}",
            found="parts of an ingest that are not joined",
            expected="a folder of parts with its catalog",
            todo="run the command of the parts with --join",
        )
    return NothingToDo(
        f"no store at {path}",
        expected="a folder with a data.mdb, created by `histopipe ingest`",
        todo="check the path",
    )


def parts_of(path: Path) -> list[Path]:
    """Return the parts of a folder that has a catalog, or the path itself."""
    catalog = None if folder_kind(path) is FolderKind.STORE else read_catalog(path)
    return [path] if catalog is None else catalog.parts


def seen_in(store: Path, records: dict[int, SlideRecord]) -> dict[int, SlideRecord]:
    """Return the records of a part, without slides that the catalog in its folder assigns to another part."""
    real = store.resolve()
    path = find_catalog(real.parent) if real.name.endswith(_SUFFIX) else None
    if path is None:
        return records
    stat = path.stat()
    part_of = _read_parts(real.parent, stat.st_ino, stat.st_mtime_ns)
    if real.name not in part_of.values():
        return records
    return {n: record for n, record in records.items() if part_of.get(record.id) == real.name}


@functools.lru_cache(maxsize=4)
def _read_parts(folder: Path, _inode: int, _time: int) -> Mapping[str, str]:
    """Return the part of each slide, cached until the catalog changes. A damaged catalog counts as empty."""
    with suppress(DamagedStore):
        catalog = read_catalog(folder)
        return catalog.slides if catalog else {}
    return {}
