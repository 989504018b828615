"""Call functions of fsspec again after failures that may pass, and describe failures without secrets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import TypeVar

from histopipe.errors import RemoteError, RemoteMissing, RemoteRefused
from histopipe.system.filesystems import is_full_disk
from histopipe.system.urls import public_url, without_secrets

T = TypeVar("T")

_TRIES = 6
_FIRST_WAIT_SECONDS = 0.3
"""Wait after the first failure. It doubles with each failure: 10 to 20 s for all six tries."""
_WAITABLE = (408, 425, 429)
"""HTTP status codes from 400 to 499 that another try may resolve: timeout, too early, too many requests."""
_PERMANENT = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
)


def tried(url: str, action: Callable[[], T], done: str = "read") -> T:
    """Call a function, several times if it fails for a reason that may pass. `done` is what it does with the URL.

    Raises:
        RemoteRefused: it failed for a reason that stays, such as a missing permission.
        RemoteError: it failed each time.
    """
    for number in range(_TRIES):
        try:
            return action()
        except (RemoteError, MemoryError):
            raise
        except Exception as error:  # the libraries raise many types
            if is_full_disk(error):
                raise
            reason, kind = _reason(error)
            if kind is not RemoteError:
                raise kind(
                    f"{public_url(url)} cannot be {done}", found=reason,
                    todo="check the URL and your credentials",
                ) from None  # fmt: skip
            if number == _TRIES - 1:
                raise RemoteError(
                    f"{public_url(url)} cannot be {done}", found=f"{reason} (tried {_TRIES} times)",
                    todo="check the connection, and run the same command again",
                ) from None  # fmt: skip
        time.sleep(_FIRST_WAIT_SECONDS * 2**number * random.uniform(0.7, 1.3))  # noqa: S311
    raise AssertionError("unreachable")


def _reason(error: BaseException) -> tuple[str, type[RemoteError]]:
    """Return the reason of a failure without secrets, and the error to raise."""
    status = next(filter(None, map(_status, _causes(error))), None)
    names = {type(cause).__name__ for cause in _causes(error)}
    permanent = isinstance(error, PermissionError | IsADirectoryError)
    permanent = permanent or not names.isdisjoint(_PERMANENT)
    if status is not None:
        permanent = 400 <= status < 500 and status not in _WAITABLE
        with suppress(ValueError):
            reason = f"{status} {HTTPStatus(status).phrase}"
            if status == HTTPStatus.NOT_FOUND:
                return reason, RemoteMissing
            return reason, RemoteRefused if permanent else RemoteError
    if isinstance(error, FileNotFoundError):
        if error.__cause__ is None or isinstance(error.__cause__, FileNotFoundError):
            return "no such file", RemoteMissing
        error = error.__cause__  # fsspec also raises this error if a server cannot be reached
    text = without_secrets(str(error)) or type(error).__name__
    return text[:300], RemoteRefused if permanent else RemoteError


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status code of an error of aiohttp, botocore, gcsfs or Azure; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status
    for name in ("status", "status_code", "code"):
        if name == "code" and not type(error).__module__.startswith("gcsfs"):
            continue  # aiohttp's errors about a broken answer have the code 400
        value = getattr(error, name, None)
        if isinstance(value, int) and 300 <= value < 600:
            return value
    return None
