"""Options made from declared settings, and a command whose `--help` lists them by group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from histopipe.cli.parameters import Duration, Fractions, Names, Share, together
from histopipe.runs.settings import DeclaredSetting, declared_settings

F = TypeVar("F", bound=Callable[..., Any])
_FORMATS: dict[str, Any] = {"path": click.Path(), "share": Share(), "duration": Duration()}
_SIMPLE = (int, float, str)


class SettingOption(click.Option):
    """An option with the group under which `--help` lists it."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose `--help` lists options by group."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                groups.setdefault(getattr(parameter, "group", "Options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def setting_options(*classes: type, skip: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Return a decorator that adds an option for each setting of some classes.

    Args:
        classes: where several declare a setting, the first of them counts; its default is listed for each.
        skip: settings without an option.
    """
    options = [
        _option(declared, classes)
        for name, declared in declared_settings(*classes).items()
        if name not in skip
    ]
    return together(*options)


def given_settings(*classes: type) -> dict[str, Any]:
    """Return the settings that were given as options of the current command."""
    context = click.get_current_context()
    return {
        name: context.params[name]
        for name in declared_settings(*classes)
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def _option(declared: DeclaredSetting, classes: tuple[type, ...]) -> Callable[[F], F]:
    defaults = _defaults(declared, classes)
    text = declared.about.help + (f"  [default: {defaults}]" if defaults else "")
    kind: dict[str, Any] = (
        {"is_flag": True} if declared.item_type is bool else {"type": _type(declared)}
    )
    return click.option(
        declared.flag, cls=SettingOption, group=declared.about.group, help=text,
        show_default=False, **kind,
    )  # fmt: skip


def _type(declared: DeclaredSetting) -> Any:
    if declared.is_list:
        return Fractions() if declared.item_type is float else Names()
    if declared.about.format:
        return _FORMATS[declared.about.format]
    return click.Choice(declared.choices) if declared.choices else declared.item_type


def _defaults(declared: DeclaredSetting, classes: tuple[type, ...]) -> str:
    """The default, and that of trainings on bags where it is another."""
    found = [
        declared_settings(kind)[declared.name]
        for kind in classes
        if declared.name in declared_settings(kind)
    ]
    texts = list(dict.fromkeys(default_text(it) for it in found))
    return "; on bags: ".join(texts)


def default_text(declared: DeclaredSetting) -> str:
    """Return the default of a setting as it is listed; empty for none."""
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
