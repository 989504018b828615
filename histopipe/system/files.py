"""Files that are whole or not there, what is closed at the end, and the filesystems that files lie on."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from histopipe.errors import DamagedStore, UsageError


class Closing:
    """What is closed at the end of a `with` block."""

    def close(self) -> None:
        """Give back what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def appearing(path: Path, *, hidden: bool = False) -> Iterator[Path]:
    """A path beside the wanted one for a file or folder; it takes the wanted name at the end, and is removed after an error.

    Args:
        path: the wanted one.
        hidden: begin its name with a dot, as no slide's does: where slides give files their names.

    Example:
        >>> with appearing(Path("metrics.json")) as part:  # doctest: +SKIP
        ...     part.write_text("{}")
    """
    prefix = ".part-" if hidden else "part-"
    part = path.with_name(f"{prefix}{path.name}")  # a prefix: some writers insist on the suffix
    try:
        yield part
        part.rename(path)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder beside one that is there; at the end it takes that one's place at once, which is then removed.

    Raises:
        OSError: the filesystem cannot put one folder in another's place.
    """
    part = folder.with_name(f".part-{folder.name}")
    if part.exists():  # of one that was killed
        shutil.rmtree(part)
    part.mkdir(mode=0o700)
    try:
        yield part
        shutil.copystat(folder, part)
        _exchange(part, folder)
    finally:
        shutil.rmtree(part)


def _exchange(one: Path, other: Path) -> None:
    """Let two paths change their names; at no moment is one of them missing.

    Source:
        renameat2(2), RENAME_EXCHANGE, which Python does not have.
    """
    here, exchange = -100, 2
    paths = os.fsencode(one), os.fsencode(other)
    if ctypes.CDLL(None, use_errno=True).renameat2(here, paths[0], here, paths[1], exchange) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(other))


def storable(text: str) -> str:
    """A text that is UTF-8: bytes of file names that are not are written as \\xNN."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(text: str) -> str:
    """A text that a terminal shows and does not obey: control characters are written as \\xNN."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_LARGEST_TEXT = 1 << 28
"""Bytes of a JSON or TOML file that is read back; `splits.json` of 100,000 slides is a tenth of that."""


def read_text(path: Path, *, most: int = _LARGEST_TEXT) -> str:
    """A text file in UTF-8 that somebody else may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer than `most` bytes, or no UTF-8.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is longer than {most:,} bytes")
    return content.decode("utf-8")


def read_json(path: Path, *, most: int = _LARGEST_TEXT) -> Any:
    """What a JSON file holds that somebody else may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too long, too deep, or no JSON.
    """
    try:
        return json.loads(read_text(path, most=most))
    except RecursionError as error:
        raise ValueError("its brackets are nested too deep") from error


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds that somebody else may have written.

    Raises:
        OSError, ValueError: as `read_json`.
    """
    try:
        return tomllib.loads(read_text(path))
    except RecursionError as error:
        raise ValueError("its brackets are nested too deep") from error


def path_within(folder: Path, name: str) -> Path:
    """Return a path in a folder by an untrusted name, such as the id of a slide.

    Raises:
        DamagedStore: the path is outside of the folder.
    """
    path = folder / name
    if ".." in Path(name).parts or not path.is_relative_to(folder) or path == folder:
        raise DamagedStore(f"the name {name!r}", expected=f"a path within {folder}")
    return path


def record_or_check(
    path: Path, settings: Mapping[str, Any], *, ignored: Collection[str], contents: str
) -> None:
    """Record the settings that the contents of a folder depend on, or compare them with the recorded ones.

    Args:
        path: the JSON file of the settings, in the folder.
        settings: as JSON values.
        ignored: settings that may differ.
        contents: what the folder holds, for messages.

    Raises:
        UsageError: a setting differs.
        DamagedStore: the recorded settings cannot be read.
    """
    if not path.exists():
        with appearing(path) as part:
            part.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        return
    try:
        recorded = read_json(path)
    except (OSError, ValueError) as error:
        raise DamagedStore(f"{path} is damaged", found=str(error)) from error
    names = sorted({*recorded, *settings}) if isinstance(recorded, dict) else []
    differing = [
        name for name in names if name not in ignored and recorded.get(name) != settings.get(name)
    ]
    if differing or not names:
        raise UsageError(
            f"{path.parent} holds {contents} made with other settings",
            found="; ".join(f"{name} {recorded[name]}" for name in differing if name in recorded),
            expected="; ".join(
                f"{name} {settings[name]}" for name in differing if name in settings
            ),
            todo="choose another --out",
        )
