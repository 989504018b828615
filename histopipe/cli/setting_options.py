"""Options generated from declared settings, and a command that lists them by group in `--help`."""

from __future__ import annotations

from collections.abc import Callable, Collection
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


class SettingsCommand(click.Command):
    """A command that lists options by group in `--help`, and gets only the settings that the user wrote."""

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

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function of the command. Its defaults apply to settings that the user did not write."""
        for parameter in self.params:
            name = str(parameter.name)
            written = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if isinstance(parameter, SettingOption) and not written:
                del ctx.params[name]
        return super().invoke(ctx)


def setting_options(*classes: type, skip: Collection[str] = ()) -> Callable[[F], F]:
    """Return a decorator that adds an option for each setting of the classes, except those in `skip`.

    If several classes declare a setting, the first declaration is used. `--help` lists the defaults of all classes.
    """
    declared = declared_settings(*classes)
    return together(
        *(_option(setting, classes) for name, setting in declared.items() if name not in skip)
    )


def _option(declared: DeclaredSetting, classes: tuple[type, ...]) -> Callable[[F], F]:
    settings = [declared_settings(kind).get(declared.name) for kind in classes]
    defaults = "; on bags: ".join(
        dict.fromkeys(default_text(setting) for setting in settings if setting is not None)
    )
    kind: dict[str, Any] = {"is_flag": True}
    if declared.item_type is not bool:
        kind = {
            "type": _type(declared),
            "multiple": declared.is_repeated,
            "metavar": declared.about.metavar,
        }
    return click.option(
        declared.flag, cls=SettingOption, group=declared.about.group, show_default=False,
        help=declared.about.help + (f"  [default: {defaults}]" if defaults else ""), **kind,
    )  # fmt: skip


def _type(declared: DeclaredSetting) -> Any:
    if declared.is_list and not declared.is_repeated:
        return fractions if declared.item_type is float else names
    if declared.word is not None:
        return NumberOr(declared.word)
    if declared.choices:
        return click.Choice(declared.choices)
    return _FORMATS.get(declared.about.format, declared.item_type)


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
