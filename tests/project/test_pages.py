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
from helpers.click_commands import click_command
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
    entries = re.findall(r"^\| (.*?) \| ", page, re.MULTILINE)
    quoted = [message for entry in entries for message in re.findall(r'"([^"]+)"', entry)]
    assert len(quoted) >= LEAST_ENTRIES
    source = [*texts()]
    assert not [message for message in quoted if not any(message in text for text in source)]


@pytest.mark.parametrize("page", ["cheat-sheet.md", "troubleshooting.md", "primer.md"])
def test_flags_exist(page: str) -> None:
    """Also those without a command, which `test_documentation_uses_existing_commands_and_flags` skips."""
    parameters = [each for name in COMMANDS for each in click_command(name).params]
    options = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    spans = re.findall(r"`([^`]+)`", (DOCS / page).read_text())
    flags = {word for span in spans for word in span.split() if word.startswith("--")}
    assert flags - {"--gpus"} <= options


def test_lines_of_the_cheat_sheet_can_be_run() -> None:
    """Nothing that is required is missing."""
    spans = re.findall(r"`([^`]+)`", (DOCS / "cheat-sheet.md").read_text())
    lines = [shlex.split(span) for span in spans if span.startswith("histopipe ")]
    assert len(lines) >= LEAST_ENTRIES
    for _, name, *words in lines:
        click_command(name).make_context(name, words, parent=click.Context(group))
