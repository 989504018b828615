from __future__ import annotations

import pickle

import lmdb
import pytest

from histopipe import errors
from histopipe.errors import ExitCode, HistopipeError
from histopipe.store.handle import ERRORS

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HistopipeError)
]
BUILTINS = {
    errors.UsageError: ValueError,
    errors.SlideUnreadable: OSError,
    errors.ScaleError: ValueError,
    errors.RouteUnfit: ValueError,
    errors.AnnotationsUnfit: ValueError,
    errors.MaskUnfit: ValueError,
    errors.StageUnfit: ValueError,
    errors.RemoteError: ConnectionError,
    errors.NothingToDo: LookupError,
    errors.DamagedStore: ValueError,
    errors.MachineShort: OSError,
    errors.WorkerLost: ConnectionError,
    errors.OutOfTime: TimeoutError,
}
CODES = {
    errors.UsageError: 2,
    errors.SpecMismatch: 2,
    errors.SlideError: 3,
    errors.SlideUnreadable: 3,
    errors.ScaleError: 3,
    errors.RouteUnfit: 3,
    errors.AnnotationsUnfit: 3,
    errors.MaskUnfit: 3,
    errors.StageUnfit: 3,
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


@pytest.mark.parametrize("kind", KINDS)
def test_errors_can_be_pickled(kind: type[HistopipeError]) -> None:
    error = kind("slide a", found=3, expected="4", todo="do that")
    assert str(error) == "slide a: found 3, expected 4; do that"
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(again), str(again), again.found) == (kind, str(error), 3)


@pytest.mark.parametrize(("kind", "builtin"), BUILTINS.items())
def test_errors_are_subclasses_of_builtin_errors(kind: type[Exception], builtin: type) -> None:
    assert issubclass(kind, builtin)


def test_message_without_optional_parts() -> None:
    assert str(HistopipeError("a")) == "a"
    assert str(HistopipeError("a", found=0)) == "a: found 0"


def test_every_lmdb_error_is_mapped() -> None:
    kinds = {k for k in vars(lmdb).values() if isinstance(k, type) and issubclass(k, lmdb.Error)}
    assert kinds - {lmdb.Error} == set(ERRORS)
