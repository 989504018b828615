"""What stands in a DICOM file's header, which may be damaged or meant badly: pydicom takes its lengths at their word."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pydicom

_LONGEST = 1 << 16
"""Bytes of a value that is read. None that is wanted is longer."""


def read_header(file: Path | BinaryIO, *names: str) -> pydicom.Dataset:
    """Some values of a file's header; a file that is open is left where its pixel data begins.

    Raises:
        ValueError: it is no DICOM file, or a damaged one.
    """
    try:
        return pydicom.dcmread(
            file, stop_before_pixels=True, specific_tags=list(names), defer_size=_LONGEST
        )
    except Exception as error:
        raise ValueError(f"its header cannot be read: {error}") from error
