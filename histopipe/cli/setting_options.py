"""Options generated from declared settings, and a command that lists them by group in `--help`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from typing import Any

import click
from click.core import ParameterSource

from histopipe.cli.parameters import F, NumberOr, duration, fractions, names, share, together
from histopipe.system.settings import DeclaredSetting, declared_settings

_FORMATS: dict[str, Any] = {"path": click.Path(), "share": share, "duration": duration}


class SettingOption(click.Option):
    """An option that belongs to a group in `--help`."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


class GroupedCommand(click.Command):
    """A command that lists options by group in `--help`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def setting_options(*classes: type, skip: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Return a decorator that adds an option for each setting of the classes, except those in `skip`.

    If several classes declare a setting, the first declaration is used. `--help` lists the defaults of all classes.
    """
    declared = declared_settings(*classes)
    return together(
        *(_option(setting, classes) for name, setting in declared.items() if name not in skip)
    )


def given_settings(*classes: type) -> dict[str, Any]:
    """Return the settings given as options of the current command."""
    context = click.get_current_context()
    return {
        name: context.params[name]
        for name in declared_settings(*classes)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def _option(declared: DeclaredSetting, classes: tuple[type, ...]) -> Callable[[F], F]:
    settings = [declared_settings(kind).get(declared.name) for kind in classes]
    defaults = "; on bags: ".join(
        dict.fromkeys(default_text(setting) for setting in settings if setting is not None)
    )
    kind: dict[str, Any] = {"is_flag": True}
    if declared.item_type is not bool:
        kind = {"type": _type(declared), "multiple": declared.is_path_list}
    return click.option(
        declared.flag, cls=SettingOption, group=declared.about.group, show_default=False,
        help=declared.about.help + (f"  [default: {defaults}]" if defaults else ""), **kind,
    )  # fmt: skip


def _type(declared: DeclaredSetting) -> Any:
    if declared.is_list and not declared.is_path_list:
        return fractions if declared.item_type is float else names
    if declared.word is not None:
        return NumberOr(declared.word)
    if declared.about.format:
        return _FORMATS[declared.about.format]
    return click.Choice(declared.choices) if declared.choices else declared.item_type


def default_text(declared: DeclaredSetting) -> str:
    """Return the default of a setting as text for `--help`, empty for none."""
    value = declared.default
    if declared.about.default_text is not None:
        return declared.about.default_text
    if value is None or value is MISSING or value is False:
        return ""
    if declared.about.format == "share":
        return f"{value:.0%}"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
