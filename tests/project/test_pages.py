"""Test pages of the documentation that quote the program: messages, commands and flags exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import histopipe
from helpers.paths import PROJECT
from histopipe.cli import COMMANDS
from histopipe.cli import histopipe as group

DOCS = PROJECT / "docs"
LEAST_ENTRIES = 30


def texts() -> Iterator[str]:
    """Yield the texts of the source, with … in the place of values."""
    for path in Path(histopipe.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_in_troubleshooting_exist() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    entries = [row[0].removeprefix("| ") for row in rows if row[0] not in ("| message", "| ---")]
    assert len(entries) >= LEAST_ENTRIES
    source = [*texts()]
    quoted = [message for entry in entries for message in re.findall(r'"([^"]+)"', entry)]
    assert len(quoted) >= LEAST_ENTRIES
    missing = [message for message in quoted if not any(message in text for text in source)]
    assert not missing


def options(command: str) -> set[str]:
    chosen = group.get_command(click.Context(group), command)
    assert chosen is not None
    return {name for parameter in chosen.params for name in parameter.opts}


ALL_OPTIONS = {name for command in COMMANDS for name in options(command)}


@pytest.mark.parametrize("page", ["cheat-sheet.md", "troubleshooting.md", "primer.md"])
def test_commands_and_flags_exist(page: str) -> None:
    spans = re.findall(r"`([^`]+)`", (DOCS / page).read_text())
    assert spans
    for span in spans:
        words = span.split()
        flags = {word for word in words if word.startswith("--")} - {"--gpus"}
        if words[0] == "histopipe" and len(words) > 1 and words[1] != "COMMAND":
            assert words[1] in COMMANDS, span
            assert flags <= options(words[1]), span
        assert flags <= ALL_OPTIONS, span


def test_lines_of_the_cheat_sheet_can_be_run() -> None:
    """Nothing that is required is missing."""
    spans = re.findall(r"`([^`]+)`", (DOCS / "cheat-sheet.md").read_text())
    lines = [shlex.split(span) for span in spans if span.startswith("histopipe ")]
    assert len(lines) >= LEAST_ENTRIES
    for _, name, *words in lines:
        chosen = group.get_command(click.Context(group), name)
        assert chosen is not None
        chosen.make_context(name, words, parent=click.Context(group))
