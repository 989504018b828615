"""What `predict` was given: stores, folders of features, or slide files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from histopipe.dataset.selection import store_paths
from histopipe.errors import NothingToDo, UsageError
from histopipe.features.feature_file import ENCODER, SUFFIX
from histopipe.system.urls import is_url

SourceKind = Literal["stores", "features", "slides"]
_DATA = "data.mdb"


def read_sources(
    sources: str | Path | Sequence[str | Path],
) -> tuple[list[Path], list[str], SourceKind]:
    """Return the paths and the URLs of sources, and their kind. URLs are those of slides.

    Raises:
        NothingToDo: a path does not exist.
        UsageError: there is no source, or they are of several kinds.
    """
    entries = [sources] if isinstance(sources, str | Path) else list(sources)
    urls = [entry for entry in entries if isinstance(entry, str) and is_url(entry)]
    rest = [entry for entry in entries if entry not in urls]
    paths = store_paths(rest) if rest or not urls else []
    kind = kind_of(paths) if paths else "slides"
    if urls and kind != "slides":
        raise UsageError(
            f"{kind} and slides at URLs are mixed", expected="stores, features or slides",
            todo="predict them separately, with different --out",
        )  # fmt: skip
    return paths, urls, kind


def kind_of(paths: Sequence[Path]) -> SourceKind:
    """Return the kind of all paths.

    Raises:
        NothingToDo: a path does not exist.
        UsageError: the paths are of several kinds.
    """
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise NothingToDo(f"{missing[0]} does not exist", todo="check the path")
    kinds = sorted({_kind(path) for path in paths})
    if len(kinds) > 1:
        raise UsageError(
            f"{' and '.join(kinds)} are mixed", expected="stores, features or slides",
            todo="predict them separately, with different --out",
        )  # fmt: skip
    return kinds[0]


def _kind(path: Path) -> SourceKind:
    if (path / _DATA).exists():
        return "stores"
    if path.is_dir() and ((path / ENCODER).exists() or any(path.rglob(f"*{SUFFIX}"))):
        return "features"
    return "slides"
