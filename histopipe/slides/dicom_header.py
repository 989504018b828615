"""Headers of DICOM files, which may be damaged or hostile: pydicom trusts the lengths in them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pydicom

_LONGEST = 1 << 16
"""Bytes of a value that is read. All values that are needed are shorter."""
_TEXT_LENGTH = 200


@contextmanager
def pydicom_warnings() -> Iterator[list[str]]:
    """Collect pydicom's warnings about damaged headers, which would otherwise be printed to the terminal.

    Yields:
        The first line of each warning, complete at the end of the block.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield found
        finally:
            texts = (str(warning.message).partition("\n")[0] for warning in caught)
            found.extend(dict.fromkeys(text[:_TEXT_LENGTH] for text in texts))


def read_header(file: Path | BinaryIO, *names: str) -> pydicom.Dataset:
    """Read some values of a file's header. An open file is left where its pixel data begins.

    pydicom warns about damaged values when they are read and when they are used: use `pydicom_warnings` around both.

    Raises:
        ValueError: it is not a DICOM file, or damaged.
    """
    try:
        return pydicom.dcmread(
            file, stop_before_pixels=True, specific_tags=list(names), defer_size=_LONGEST
        )
    except Exception as error:
        raise ValueError(f"its header cannot be read: {error}") from error


def read_text(path: Path, name: str) -> str | None:
    """Return a value of a file's header as text; None if it is missing, or the header cannot be read."""
    with pydicom_warnings():
        try:
            value: Any = read_header(path, name).get(name, "")
            return str(value) or None
        except ValueError:
            return None
