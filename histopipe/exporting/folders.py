"""Folders that an export writes: on a local disk, or at a URL."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from histopipe.errors import RemoteMissing, UsageError
from histopipe.runs import folder as run_folder
from histopipe.splits.splits import patches_crc
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.download import download
from histopipe.system.files import read_json, reading, write_atomically
from histopipe.system.object_storage import list_files, remote_file, upload
from histopipe.system.urls import public_url

SETTINGS = "export.json"
"""File with the settings of an export, in its folder."""


class ExportFolder:
    """A local folder for files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def place(self) -> Path | str:
        """Path or URL, for messages."""
        return self.path

    def open(self) -> AbstractContextManager[object]:
        """Lock the folder."""
        return run_folder.held(self.path)

    def complete(self, paths: Sequence[Path]) -> set[Path]:
        """Return the files that are complete."""
        return {path for path in paths if os.path.exists(path)}  # noqa: PTH110 - a name may be too long

    def finish(self, path: Path) -> None:
        """Make a file that was written visible."""


class UrlFolder(ExportFolder):
    """A folder at a URL. Each file is written locally, sent and removed, so that the disk holds one file at a time."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(path)
        self._url = url.rstrip("/")

    @property
    def place(self) -> Path | str:
        """The URL without secrets."""
        return public_url(self._url)

    def open(self) -> AbstractContextManager[object]:
        """Fetch the settings of an earlier export."""
        self._there = self._listed()
        settings = f"{self._url}/{SETTINGS}"
        if settings in self._there:
            download(remote_file(settings), self.path / SETTINGS)
        elif self._there:
            raise UsageError(f"{self.place} is not empty", todo="choose another --out")
        return nullcontext()

    def complete(self, paths: Sequence[Path]) -> set[Path]:
        """Return the files that are complete, and send the settings."""
        upload(self.path / SETTINGS, f"{self._url}/{SETTINGS}")
        return {path for path in paths if self._target(path) in self._there}

    def finish(self, path: Path) -> None:
        """Send a file, and remove it."""
        upload(path, self._target(path))
        path.unlink()

    def _target(self, path: Path) -> str:
        return f"{self._url}/{path.relative_to(self.path).as_posix()}"

    def _listed(self) -> set[str]:
        with suppress(RemoteMissing):
            return {file.url for file in list_files(f"{self._url}/")}
        return set()


def record_settings(
    folder: Path, store: Store, slides: dict[int, SlideRecord], to: str, shard_patches: int
) -> None:
    """Record the settings of the export. UsageError if the folder holds another export, or slides have changed."""
    path = folder / SETTINGS
    crcs = {
        record.id: zlib.crc32(str(record.label).encode(), patches_crc(store, number))
        for number, record in slides.items()
    }
    now: dict[str, Any] = {"to": to, "store": store.uuid, "slides": crcs}
    if to == "webdataset":
        now["shard_patches"] = shard_patches
    if path.exists():
        with reading(path):
            old = read_json(path)
            differing = [name for name in now if name != "slides" and old.get(name) != now[name]]
            before: dict[str, int] = old["slides"]
        # In tar files, a new slide would shift all patches that follow.
        same = before == crcs if to == "webdataset" else before.items() <= crcs.items()
        if differing or not same:
            what = ", ".join(differing) or "slides were ingested, labelled or removed since"
            raise UsageError(
                f"{folder} holds another export", found=f"another {what}" if differing else what,
                todo="choose another --out",
            )  # fmt: skip
    elif any(folder.iterdir()):
        raise UsageError(f"{folder} exists and is not empty", todo="choose another --out")
    write_atomically(path, json.dumps(now, indent=1) + "\n")
