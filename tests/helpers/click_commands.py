"""The parsers of the commands."""

from __future__ import annotations

import click

from histopipe.cli import histopipe as group


def click_command(name: str) -> click.Command:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    return command
