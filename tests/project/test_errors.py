from __future__ import annotations

import copyreg
import errno
import os
import pickle
from pathlib import Path

import lmdb
import pytest

from histopipe import errors
from histopipe.errors import (
    DamagedStore,
    ExitCode,
    HistopipeError,
    MachineShort,
    OutOfMemory,
    SlideUnreadable,
    UsageError,
    portable,
)
from histopipe.store.data_file import ERRORS
from histopipe.system.files import atomic_write, remove_parts, shortened
from histopipe.system.output import slide_failure
from histopipe.system.worker_pool import WorkerDied

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HistopipeError)
]
BUILTINS = {
    errors.UsageError: ValueError,
    errors.SlideUnreadable: OSError,
    errors.OptionUnfit: ValueError,
    errors.ScaleError: ValueError,
    errors.MaskUnfit: ValueError,
    errors.RemoteError: ConnectionError,
    errors.NothingToDo: LookupError,
    errors.DamagedStore: ValueError,
    errors.MachineShort: OSError,
    errors.WorkerLost: ConnectionError,
    errors.OutOfTime: TimeoutError,
}
CODES = {
    errors.UsageError: 2,
    errors.SlideError: 3,
    errors.SlideUnreadable: 3,
    errors.ScaleError: 3,
    errors.OptionUnfit: 3,
    errors.MaskUnfit: 3,
    errors.NothingToDo: 4,
    errors.DamagedStore: 5,
    errors.UnknownVersion: 5,
    errors.MachineShort: 6,
    errors.OutOfMemory: 6,
    errors.OutOfTime: 6,
    errors.WorkerLost: 6,
    errors.RemoteError: 6,
    errors.RemoteRefused: 2,
    errors.RemoteMissing: 2,
    errors.Interrupted: 130,
    HistopipeError: 1,
}


def test_every_error_has_its_exit_code() -> None:
    assert {kind: int(kind.exit_code) for kind in KINDS} == CODES
    assert {int(code) for code in ExitCode} == {0, 1, 2, 3, 4, 5, 6, 130}
    texts = [str(HistopipeError("a")), str(HistopipeError("a", found=0))]
    assert texts == ["a", "a: found 0"]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_can_be_pickled(kind: type[HistopipeError]) -> None:
    error = kind("slide a", found=3, expected="4", todo="do that")
    assert str(error) == "slide a: found 3, expected 4; do that"
    assert issubclass(kind, BUILTINS.get(kind, Exception))
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(again), str(again), again.found) == (kind, str(error), 3)
    of_library = kind("slide a", found=OfLibrary("denied", code=403), todo="do that")
    of_library.add_note("trace")
    again = pickle.loads(pickle.dumps(of_library))  # noqa: S301 - our own bytes
    assert (type(again), str(again)) == (kind, "slide a: found denied; do that")
    assert again.__notes__ == ["trace"]


class OfLibrary(Exception):
    """An error that can be sent to another process, but not read there, as those of botocore."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


def test_errors_that_cannot_be_read_elsewhere_keep_name_and_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Dask makes the errors that exist when it is loaded readable.
    monkeypatch.delitem(copyreg.dispatch_table, OfLibrary, raising=False)
    error = ValueError("x")
    assert portable(error) is error
    for unreadable in (OfLibrary("denied", code=403), ValueError(lambda: None)):
        text = f"{type(unreadable).__name__}: {unreadable}"
        assert str(pickle.loads(pickle.dumps(portable(unreadable)))) == text  # noqa: S301 - our own


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SlideUnreadable("a.svs is empty"), "a.svs is empty"),
        (DamagedStore("index damaged"), "index damaged"),
        (KeyError("x"), "KeyError: 'x'; this is a bug in histopipe"),
        (MemoryError(), "memory ran out; use fewer --workers"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a.csv"), "File name too long: a.csv"),
        (OSError("cannot write"), "cannot write"),
        (WorkerDied("killed by SIGSEGV"), "the worker process died (killed by SIGSEGV)"),
    ],
)
def test_errors_of_one_slide_have_a_reason(error: Exception, text: str) -> None:
    assert slide_failure(error).startswith(text)


@pytest.mark.parametrize(
    "error",
    [MachineShort("disk"), OutOfMemory("memory"), UsageError("--x"), OSError(errno.ENOSPC, "full")],
)
def test_errors_of_all_slides_are_raised_again(error: Exception) -> None:
    with pytest.raises(type(error)):
        slide_failure(error)


def test_temporary_names_are_short_and_unique(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 251 + ".csv")
    with atomic_write(path) as first, atomic_write(path) as second:
        assert first != second
        for part in (first, second):
            part.write_text("first" if part == first else "second")
            assert len(part.name) < 50 and part.suffix == ".csv" and part.name.startswith(".part-")
    assert path.read_text() == "first"  # the outer one was renamed last
    with pytest.raises(OSError, match="too long"), atomic_write(tmp_path / ("y" * 256)) as part:
        part.touch()
    assert list(tmp_path.iterdir()) == [path]


def test_parts_of_ended_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".part-{2**30:x}-0123abcd").mkdir()
    (tmp_path / f".part-{2**30:x}-0123abcd.csv").touch()
    # Files of a running process, and of other commands.
    kept = {tmp_path / f".part-{os.getpid():x}-0123abcd.csv", tmp_path / ".part-cohort.lmdb"}
    for other in kept:
        other.touch()
    remove_parts(tmp_path)
    assert set(tmp_path.iterdir()) == kept


def test_shortened_names() -> None:
    names = ["a" * 255, "a" * 256, "a" * 257, "ä" * 200, "b.csv"]
    short = [shortened(name) for name in names]
    assert (short[0], short[-1]) == (names[0], names[-1])
    assert len(set(short)) == len(short) and max(len(os.fsencode(name)) for name in short) == 255


def test_every_lmdb_error_is_mapped() -> None:
    classes = {k for k in vars(lmdb).values() if isinstance(k, type) and issubclass(k, lmdb.Error)}
    assert classes - {lmdb.Error} == set(ERRORS)
