"""Folders of the project that tests use."""

from __future__ import annotations

import os
from pathlib import Path

PROJECT = Path(__file__).parents[2]
TOOLS = PROJECT / "tools"
TESTS = PROJECT / "tests"
PROGRAMS = TESTS / "programs"
GOLDEN = TESTS / "golden"
ENCODERS = TESTS / "encoders"
SLIDE_ENCODERS = TESTS / "slide_encoders"

FAULTY_PATH = os.pathsep.join(
    [str(PROGRAMS / "faults"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
"""Module path of a fork server with fault injection."""
