"""Settings of commands from the TOML file of a study, which has a table for each command; see `histopipe init`.

The names in a table are those of the flags, with underscores, and of the arguments. A value becomes the text of its
flag, so that the command checks both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import LISTS, PATH, SETTINGS_FILE, F, path_or_url
from histopipe.errors import UsageError
from histopipe.system.settings import ANY_PATH, absolute_path, check_known, read_toml


def config_option(*, passed: bool = False) -> Callable[[F], F]:
    """Return the option `--config`. If it is `passed`, the command gets the path of a file without tables."""
    of_run = ", or config.toml of a run" if passed else ""
    return click.option(
        "--config",
        type=PATH,
        is_eager=True,
        expose_value=passed,
        callback=_read,
        help=f"TOML file of a study, see `histopipe init`{of_run}; flags override it, --no-FLAG a flag.",
    )


def _read(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Make the table of the command its defaults."""
    values = {} if path is None else read_toml(path)
    if path is None or (
        option.expose_value and not any(isinstance(value, dict) for value in values.values())
    ):
        return path
    commands = context.find_root().command
    assert isinstance(commands, click.Group)  # noqa: S101 - `histopipe`
    check_known(values, commands.list_commands(context), f"{path}: unknown tables")
    context.default_map = flags_of(context.command, values, path)
    context.meta[SETTINGS_FILE] = values, path
    return None


def settings_of(command: click.Command) -> dict[str, Any]:
    """Return the settings of another command in the file that the current command reads, by name."""
    context = click.get_current_context()
    texts = flags_of(command, *context.meta.get(SETTINGS_FILE, ({}, Path())))
    of_command = click.Context(command)
    return {
        str(parameter.name): parameter.type_cast_value(of_command, texts[str(parameter.name)])
        for parameter in command.params
        if parameter.name in texts
    }


def flags_of(command: click.Command, values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what the flags and arguments of a command would be, by the name of the parameter.

    Raises:
        UsageError: a name is unknown, or a value is a table.
    """
    name = str(command.name)
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {name}", found=repr(table), expected=f"a table [{name}]")
    parameters = {_key(each): each for each in command.params if each.name != "config"}
    check_known(table, parameters, f"{path}: unknown settings in [{name}]")
    return {
        str(parameters[key].name): _flag(parameters[key], value, path, f"{path}: [{name}] {key}")
        for key, value in table.items()
    }


def _key(parameter: click.Parameter) -> str:
    """Return the name of a parameter in a file."""
    if isinstance(parameter, click.Argument):
        return str(parameter.name)
    return max(parameter.opts, key=len).lstrip("-").replace("-", "_")


def _flag(parameter: click.Parameter, value: Any, path: Path, where: str) -> Any:
    items = value if isinstance(value, list) else [value]
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    if is_flag and isinstance(value, bool):
        return value
    if is_flag or any(
        isinstance(item, bool) or not isinstance(item, str | int | float) for item in items
    ):
        raise UsageError(
            where,
            found=repr(value)[:80],
            expected="true or false" if is_flag else "a text, a number, or a list of these",
        )
    texts = [absolute_path(str(item), _path_of(parameter), path.parent) for item in items]
    if getattr(parameter, "multiple", False) or parameter.nargs == -1:
        return texts
    if isinstance(value, list) and getattr(parameter.type, "func", None) not in LISTS:
        raise UsageError(where, found=repr(value)[:80], expected="one value")
    return ",".join(texts)


def _path_of(parameter: click.Parameter) -> str:
    """Return the regular expression of the texts of a parameter that have a path; see `Setting.path`."""
    is_path = (
        isinstance(parameter.type, click.Path)
        or getattr(parameter.type, "func", None) is path_or_url
    )
    return ANY_PATH if is_path else getattr(parameter, "path", "")
