"""Folders of the project that tests use."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).parents[2]
TOOLS = PROJECT / "tools"
TESTS = PROJECT / "tests"
PROGRAMS = TESTS / "programs"
GOLDEN = TESTS / "golden"
ENCODERS = TESTS / "encoders"
