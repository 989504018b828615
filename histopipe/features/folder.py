"""A folder of feature files, and what made them: features of two encoders must not end up in one folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, UsageError
from histopipe.system.files import appearing, read_json

SUFFIX = ".h5"
_FACTS = "features.json"


def path_within(folder: Path, name: str) -> Path:
    """A path in a folder, by a name that may come from a stranger: a slide, a patient, a label.

    Raises:
        DamagedStore: it would lie outside.
    """
    path = folder / name
    if ".." in Path(name).parts or not path.is_relative_to(folder) or path == folder:
        raise DamagedStore(f"the name {name!r}", expected=f"a path within {folder}")
    return path


def feature_path(folder: Path, slide_id: str) -> Path:
    """Where a slide's features lie.

    Raises:
        DamagedStore: the id points out of the folder.
    """
    return path_within(folder, f"{slide_id}{SUFFIX}")


def feature_files(folder: Path) -> dict[str, Path]:
    """The feature files of a folder by slide id, in the order of these.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", expected="one of feature files")
    found = {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in folder.rglob(f"*{SUFFIX}")
        if path.is_file() and not path.name.startswith(".")
    }
    return dict(sorted(found.items()))


def pin_encoder(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write down what makes a folder's features, or hold it against what made those that are there.

    Raises:
        UsageError: they were made by something else.
        DamagedStore: what is written there cannot be read.
    """
    strangers = {} if (folder / _FACTS).exists() else feature_files(folder)
    if strangers:
        raise UsageError(
            f"{folder} holds files that `histopipe embed` did not make",
            found=", ".join(list(strangers)[:3]), todo="choose another --out",
        )  # fmt: skip
    # What a file is called says nothing: the weights themselves are compared.
    hold_against(folder / _FACTS, facts, silent=("encoder",), what="features")


def hold_against(
    path: Path, facts: Mapping[str, Any], *, silent: Collection[str], what: str
) -> None:
    """Write down what makes the contents of a folder, or hold it against what made those that are there.

    Args:
        path: the file in the folder.
        facts: as JSON holds them.
        silent: facts that may differ.
        what: the contents are.

    Raises:
        UsageError: something else made them.
        DamagedStore: what is written there cannot be read.
    """
    if not path.exists():
        with appearing(path) as part:
            part.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        return
    try:
        there = read_json(path)
    except (OSError, ValueError) as error:
        raise DamagedStore(f"{path} is damaged", found=str(error)) from error
    names = sorted({*there, *facts}) if isinstance(there, dict) else []
    differing = [
        name for name in names if there.get(name) != facts.get(name) and name not in silent
    ]
    if differing or not names:
        raise UsageError(
            f"{path.parent} holds {what} that were made otherwise",
            found="; ".join(f"{name} {there[name]}" for name in differing if name in there),
            expected="; ".join(f"{name} {facts[name]}" for name in differing if name in facts),
            todo="choose another --out",
        )
