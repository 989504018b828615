"""Atomic writers, stopped at any system call: readers see the old content or the new one, and nothing else."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.examples import examples
from histopipe.system.files import atomic_write, replacing, write_atomically

Content = bytes | dict[str, bytes] | None


class Stopped(BaseException):
    """The process was killed, so that it can clean up nothing."""


def write_folder(path: Path, new: bytes) -> None:
    with atomic_write(path) as part:
        part.mkdir()
        (part / "a").write_bytes(new)
        (part / "b").write_bytes(b"b")


def replace_folder(path: Path, new: bytes) -> None:
    with replacing(path) as part:
        (part / "a").write_bytes(new)


def contents(path: Path) -> Content:
    if path.is_dir():
        return {entry.name: entry.read_bytes() for entry in path.iterdir()}
    return path.read_bytes() if path.exists() else None


@contextmanager
def stopping(at: int, *, killed: bool, late: bool) -> Iterator[None]:
    """Stop at a system call: as a kill, before or after it, or as a full disk, which the next calls do not see."""
    calls = 0

    def stops_at(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at and killed and late:
                getattr(call(*arguments, **options), "close", int)()  # of an opened file
            if calls == at or (killed and calls > at):
                raise Stopped if killed else OSError(errno.ENOSPC, "No space left on device")
            return call(*arguments, **options)

        return counted

    def open_file(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file: Any = io_open(path, mode, *arguments, **options)
        if "w" in mode:
            file.write = stops_at(file.write)
        return file

    io_open, library = io.open, ctypes.CDLL(None, use_errno=True)
    exchange = SimpleNamespace(renameat2=stops_at(library.renameat2))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, stops_at(getattr(os, name)))
        patch.setattr(io, "open", stops_at(open_file))
        patch.setattr(ctypes, "CDLL", lambda *_, **__: exchange)
        yield


@pytest.mark.parametrize("write", [write_atomically, write_folder, replace_folder])
@examples(300)
@given(
    old=st.none() | st.binary(max_size=9),
    new=st.binary(max_size=40),
    at=st.integers(1, 12),
    killed=st.booleans(),
    late=st.booleans(),
)
def test_stopped_writers_leave_the_old_or_the_new_content(
    write: Callable[[Path, bytes], None],
    old: bytes | None,
    new: bytes,
    at: int,
    killed: bool,
    late: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        path, expected = Path(folder) / "result", Path(other) / "result"
        if write is replace_folder:
            for place in (path, expected):
                place.mkdir()
            (path / "old").write_bytes(old or b"")
        elif old is not None and write is not write_folder:
            path.write_bytes(old)
        before = contents(path)
        write(expected, new)
        ended = False
        with suppress(Stopped, OSError), stopping(at, killed=killed, late=late):
            write(path, new)
            ended = True
        assert contents(path) in ((contents(expected),) if ended else (before, contents(expected)))
        hidden = set(Path(folder).glob(".part-*"))
        assert {*Path(folder).iterdir()} - hidden <= {path}
        # After an error, only a replaced folder that cannot be removed is left.
        assert not hidden or (not ended and (killed or contents(path) != before))
        if contents(path) == before:  # the next process is not disturbed
            write(path, new)
            assert contents(path) == contents(expected)
