"""Which part of a folder of stores holds which slide: what several machines have ingested at once is one data set.

`catalog.json` is written by the one process that gives out slides, each time a part is there whole. A slide may lie in several
parts, as when a machine was thought lost and was not: the catalog names one, and the others are not seen.
"""

from __future__ import annotations

import functools
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from histopipe.errors import DamagedStore, NothingToDo, UnknownVersion
from histopipe.store.record import SlideRecord
from histopipe.system.files import appearing, read_json

CATALOG = "catalog.json"
_VERSION = 1
_SUFFIX = ".lmdb"


@dataclass(slots=True)
class Catalog:
    """The slides of a folder of parts.

    Attributes:
        folder: where the parts are.
        uuid: new for every catalog.
        slides: the name of each slide's part, by slide id.
    """

    folder: Path
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    slides: dict[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> list[Path]:
        """The parts that hold slides, in the order of their names."""
        return [self.folder / name for name in sorted(set(self.slides.values()))]

    def write(self) -> None:
        """Put it in the folder, whole."""
        content = {"version": _VERSION, "uuid": self.uuid, "slides": self.slides}
        with appearing(self.folder / CATALOG, hidden=True) as part, part.open("w") as file:
            json.dump(content, file, ensure_ascii=False, indent=0)
            file.flush()
            os.fsync(file.fileno())


def read_catalog(folder: Path) -> Catalog | None:
    """The catalog of a folder; None if it has none.

    Raises:
        DamagedStore, UnknownVersion: it cannot be read, or is of a later version.
    """
    path = folder / CATALOG
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DamagedStore(f"{path} cannot be read", found=str(error)[:200]) from error
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        found = content.get("version") if isinstance(content, dict) else type(content).__name__
        raise UnknownVersion(f"{path} is of version {found}", expected=f"version {_VERSION}")
    names, slides = content.get("uuid"), content.get("slides")
    if not isinstance(names, str) or not _are_parts(slides):
        raise DamagedStore(
            f"{path} is damaged", expected="a uuid, and a part's name for each slide"
        )
    return Catalog(folder, names, dict(slides))


def _are_parts(slides: Any) -> TypeGuard[dict[str, str]]:
    """Whether each slide has the name of a part within the folder."""
    return isinstance(slides, dict) and all(
        isinstance(part, str) and part.endswith(_SUFFIX) and part[0] != "." and "/" not in part
        for part in set(slides.values())
    )


def no_store(path: Path) -> NothingToDo:
    """What to say where a store was expected: a folder of parts is one to those who read data sets only."""
    if (path / CATALOG).exists():
        return NothingToDo(
            f"no store at {path}", found="a folder of parts", expected="one store",
            todo="name one of its parts, or make one store of them: `histopipe merge`",
        )  # fmt: skip
    return NothingToDo(
        f"no store at {path}",
        expected="a folder with a data.mdb, made by `histopipe ingest`",
        todo="check the path",
    )


def parts_of(path: Path) -> list[Path]:
    """The stores that a path stands for: the parts of a folder with a catalog, or itself."""
    catalog = read_catalog(path)
    return [path] if catalog is None else catalog.parts


def seen_in(store: Path, records: dict[int, SlideRecord]) -> dict[int, SlideRecord]:
    """The records of a part that the catalog beside it names there; all of them where there is none."""
    seen = _seen(store.resolve())
    if seen is None:
        return records
    return {number: record for number, record in records.items() if record.id in seen}


def _seen(store: Path) -> frozenset[str] | None:
    try:
        stat = (store.parent / CATALOG).stat()
    except OSError:
        return None
    return _by_part(store.parent, stat.st_ino, stat.st_mtime_ns).get(store.name, frozenset())


@functools.lru_cache(maxsize=4)
def _by_part(folder: Path, _inode: int, _time: int) -> Mapping[str, frozenset[str]]:
    """The slides of each part; read once for as long as the file is the same."""
    catalog = read_catalog(folder)
    found: dict[str, set[str]] = defaultdict(set)
    for slide, part in (catalog.slides if catalog else {}).items():
        found[part].add(slide)
    return {part: frozenset(slides) for part, slides in found.items()}
