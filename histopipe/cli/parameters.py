"""Value types, options and output shared by several commands; options generated from declared settings."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from histopipe.errors import ExitCode, UsageError
from histopipe.system.urls import is_url

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

    from histopipe.system.settings import Setting

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)\s*([smhd]?)")
_DEFAULT_STORE = "patches.lmdb"

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)


def path_or_url(text: str | Path) -> Path | str:
    """Return a path, or a URL, which stays a text."""
    return text if is_url(text) else Path(text)


def plan_option(what: str = "the parts with their work") -> Callable[[F], F]:
    """Return an option that shows a plan."""
    return click.option("--plan", "plan_only", is_flag=True, help=f"Write nothing; show {what}.")


def duration(text: str) -> float:
    """Convert `2h`, `90m`, `45s` or a number of seconds to seconds."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else math.inf
    if not math.isfinite(seconds):
        raise click.BadParameter(
            f"{text!r} is not a duration: write 2h, 90m, 45s or a number of seconds"
        )
    return seconds


def names(text: str) -> tuple[str, ...]:
    """Split a list such as `flips,colour`."""
    return tuple(part.strip() for part in text.split(","))


def fractions(text: str) -> tuple[float, ...]:
    """Convert a list such as `0.7,0.15,0.15` to numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers: write 0.7,0.15,0.15"
        ) from error


def whole_numbers(text: str) -> tuple[int, ...]:
    """Convert a list such as `1,2,4` to whole numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers: write 1,2,4") from error


LISTS = (names, fractions, whole_numbers)
"""Types of options whose value is a list."""


def share(text: str) -> float:
    """Convert `1%` or `0.01` to a number from 0 to 1."""
    text = text.strip()
    try:
        number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise click.BadParameter(f"{text!r} is not a share: write 1% or 0.01")
    return number


def store_option(help: str) -> Callable[[F], F]:
    """Return the repeatable option `--store`."""
    return click.option("--store", "stores", multiple=True, type=PATH, help=help)


def json_option(what: str = "the result") -> Callable[[F], F]:
    """Return the option `--json`."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")


class SettingOption(click.Option):
    """An option whose range is checked, but not shown in `--help`. A declared setting also has a group there."""

    def __init__(
        self, *names: Any, group: str | None = None, path: str = "", **attributes: Any
    ) -> None:
        super().__init__(*names, **attributes)
        self.group, self.path = group, path

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Return what is shown after the help text: default and required."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


_EXCLUSIVE = (("mpp", "level"), ("stores", "mil"), ("splits", "folds"))
"""Parameters of which one on the command line takes the place of another one in the file."""
SETTINGS_FILE = "histopipe.settings_file"
"""Where the context of a command has the contents and the path of the file of a study that it reads."""


class SettingsCommand(click.Command):
    """A command that lists options by group in `--help`, and gets only the settings that the user wrote.

    Its flags and errors fit the file of a study: `--no-FLAG` unsets a flag of the file, and errors name the file.
    """

    @property
    def params(self) -> list[click.Parameter]:
        """Arguments and options. Those of declared settings are made now, since one command needs no others."""
        listed: list[Any] = self._listed
        self._listed: list[click.Parameter] = []
        for each in listed:
            self._listed += [each] if isinstance(each, click.Parameter) else each()
        return self._listed

    @params.setter
    def params(self, listed: list[click.Parameter]) -> None:
        self._listed = listed

    def make_parser(self, ctx: click.Context) -> Any:
        """Return the parser, which also knows the opposite of each flag."""
        parser = super().make_parser(ctx)
        for option in self.params:
            if isinstance(option, click.Option) and option.is_flag:
                name = max(option.opts, key=len).removeprefix("--")
                opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
                parser.add_option(
                    option, [f"--{opposite}"], option.name, "store_const", const=False
                )
        return parser

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Convert the flags; an error names the file that has the value."""
        try:
            left = super().parse_args(ctx, args)
        except click.BadParameter as error:
            if error.param is not None and error.param.name in names_in_file(ctx):
                reason = error.message or "a value is missing"
                message = f"{reason} (in {ctx.meta[SETTINGS_FILE][1]})"
                raise click.BadParameter(message, ctx, error.param) from error
            raise
        of_file = set(names_in_file(ctx))
        for group in _EXCLUSIVE:
            if ParameterSource.COMMANDLINE in map(ctx.get_parameter_source, group):
                for name in of_file & {*group}:
                    ctx.params[name] = ()
                    ctx.set_parameter_source(name, ParameterSource.DEFAULT)
        return left

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                group = getattr(parameter, "group", None) or "Options"
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function of the command. Its defaults apply to settings that the user did not write."""
        for parameter in self.params:
            name = str(parameter.name)
            written = ctx.get_parameter_source(name) in (
                ParameterSource.COMMANDLINE,
                ParameterSource.DEFAULT_MAP,
            )
            if getattr(parameter, "group", None) is not None and not written:
                del ctx.params[name]
        try:
            return super().invoke(ctx)
        except UsageError:
            if of_file := ", ".join(names_in_file(ctx)):
                click.echo(f"settings of {ctx.meta[SETTINGS_FILE][1]}: {of_file}", err=True)
            raise


def names_in_file(ctx: click.Context) -> list[str]:
    """Return the names of the parameters whose values are from the file of a study."""
    names = [str(parameter.name) for parameter in ctx.command.params]
    return [n for n in names if ctx.get_parameter_source(n) is ParameterSource.DEFAULT_MAP]


store_argument = click.argument("store", type=PATH, default=_DEFAULT_STORE)
workers_option = click.option(
    "--workers",
    cls=SettingOption,
    type=click.IntRange(1),
    metavar="INTEGER",
    help="Number of processes, 1 or more.  [default: one per core]",
)


class NumberOr(click.ParamType[int | str]):
    """A whole number, or a word such as "auto"."""

    def __init__(self, word: str) -> None:
        self.name, self._word = f"integer|{word}", word

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return the number or the word."""
        if value == self._word or isinstance(value, int):
            return cast(int | str, value)
        if not re.fullmatch(r"[+-]?\d+", str(value).strip(), re.ASCII):
            self.fail(f"{value!r} is neither a whole number nor {self._word}", param, ctx)
        return int(value)


full_option = click.option("--full", is_flag=True, help="Also decode every patch and picture.")


def show(
    result: Any,
    *,
    as_json: bool = False,
    notes: Iterable[str] = (),
    text: str | None = None,
    then: Sequence[object] = (),
    **fields: str,
) -> int:
    """Print a result as JSON; or as text, with notes and the next command (`then`) on standard error.

    `text` is printed in the place of the text of the result. `fields` are added to its JSON.

    Returns:
        The exit code of the result; 0 if it has none.
    """
    if as_json:
        show_json({**fields, **result.to_json()})
    else:
        for note in notes:
            echo(note, err=True)
        show_text(str(result) if text is None else text)
        if then:
            echo(f"next: histopipe {shlex.join(map(str, then))}", err=True)
    return getattr(result, "exit_code", ExitCode.DONE)


def show_json(value: Any) -> None:
    """Print a JSON value."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    show_text(text, functools.partial(json.dumps, value, indent=2))


def show_text(text: str, escape: Callable[[], str] | None = None) -> None:
    """Print text, or its escaped form if standard output cannot encode it, such as paths with bytes that are not UTF-8."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = escape() if escape else text.encode("ascii", "backslashreplace").decode()
    echo(text)


def echo(text: str, *, err: bool = False) -> None:
    """Print text after the work. The exit code does not depend on a reader that has ended."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        discard_output(2 if err else 1)


def discard_output(*streams: int) -> None:
    """Redirect standard streams by number to nowhere, so that what they still hold raises no error at the end."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def untrusted_option(*, model: bool = False, passed: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds `--untrusted`, which verifies the input before the command runs.

    Stores, features and coordinates are recognized by the names of the parameters. With `model`, the network and its
    weights are checked, too. With `passed`, the command also gets the flag.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def checked(*args: Any, untrusted: bool, **values: Any) -> Any:
            if untrusted:
                # Settings that were not given are no values.
                names = {f"{each.name}" for each in click.get_current_context().command.params}
                check_untrusted_input(values, names, model=model)
            if passed:
                values["untrusted"] = untrusted
            return command(*args, **values)

        flag = click.option(
            "--untrusted",
            is_flag=True,
            help="Treat the input as untrusted: verify stores before opening them, and follow no paths in them.",
        )
        return cast(F, flag(checked))

    return decorate


def check_untrusted_input(
    values: Mapping[str, Any], parameters: Collection[str] = (), *, model: bool
) -> None:
    """Check the input that flags, settings files, or a run to be resumed or drawn name."""
    from histopipe.features.feature_sets import check_features
    from histopipe.ingestion.coords import check_coords
    from histopipe.maintenance.verify import check_untrusted
    from histopipe.pretrained.encoders import check_untrusted_model
    from histopipe.system.folders import CONFIG, FolderKind, folder_kind
    from histopipe.system.settings import read_toml

    resumed = values.get("resume") and values.get("out") and Path(values["out"]) / CONFIG
    drawn = "predictions" in values and Path(values["predictions"]) / CONFIG  # of `heatmap`
    named_files = (values.get("config"), values.get("space"), resumed, drawn)
    files = [Path(file) for file in named_files if file]
    tables = [values, *(read_toml(file) for file in files if file.is_file())]
    named = any(table.get(name) for table in tables for name in ("stores", "sources"))
    if {"stores", "sources"} & {*values, *parameters} and not named:
        tables.append({"stores": _DEFAULT_STORE})
    for table in tables:
        texts = _texts(table, "store", "stores", "sources", "path", "paths")
        for path in (Path(text) for text in texts if not is_url(text)):
            # A store, or a folder of stores and of feature files.
            is_store = folder_kind(path) is FolderKind.STORE
            for store in [path] if is_store else sorted(path.glob("[!.]*.lmdb")):
                check_untrusted(store)
            if any(path.glob("*.h5")):
                check_features(path)
        for folder in filter(Path.is_dir, map(Path, _texts(table, "mil", "features"))):
            check_features(folder)
        networks = (_texts(table, "model") or [""]) if model else []
        # Weights of one of several networks are NAME=FILE.
        texts = _texts(table, "weights")
        of_networks = [*texts, *(text.partition("=")[2] for text in texts), ""]
        for network, weights in itertools.product(networks, of_networks):
            check_untrusted_model(network, weights)
        for folder in map(Path, _texts(table, "coords")):
            check_coords(folder)


def _texts(table: Mapping[str, Any], *names: str) -> list[str]:
    """Return the texts and paths with these names in a table, also in lists. A wrong value is refused by the command."""
    values = (table.get(name) for name in names)
    listed = (value if isinstance(value, list | tuple) else [value] for value in values)
    return [str(item) for items in listed for item in items if isinstance(item, str | Path)]


_FORMATS: dict[str, Any] = {"path": click.Path(), "share": share, "duration": duration}


def setting_options(*classes: type | str, skip: Collection[str] | str = ()) -> Callable[[F], F]:
    """Return a decorator that adds an option for each setting of the classes, except those in `skip`.

    Classes, tuples of classes, and `skip`, may be names of objects in this package: they are imported when the command is
    used. If several classes declare a setting, the first declaration is used. `--help` lists the defaults of all classes.
    """

    def options() -> list[click.Parameter]:
        from histopipe.system.settings import (
            declared_settings,  # the list of all commands does not need it
        )

        named = [_named(each) if isinstance(each, str) else each for each in classes]
        declaring = list(
            itertools.chain(*(each if isinstance(each, tuple) else [each] for each in named))
        )
        of_classes = [declared_settings(each) for each in declaring]
        skipped = _named(skip) if isinstance(skip, str) else skip
        return [
            _option(declared, of_classes)
            for name, declared in declared_settings(*declaring).items()
            if name not in skipped
        ]

    return made_when_used(options)


def made_when_used(options: Callable[[], list[click.Parameter]]) -> Callable[[F], F]:
    """Return a decorator that adds options to a `SettingsCommand`, which makes them when it is used."""

    def add(command: F) -> F:
        vars(command).setdefault("__click_params__", []).append(options)
        return command

    return add


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"histopipe.{module}"), attribute)


def _option(declared: Setting, of_classes: Sequence[Mapping[str, Setting]]) -> click.Parameter:
    settings = [settings.get(declared.name) for settings in of_classes]
    defaults = "; on bags: ".join(
        dict.fromkeys(setting.default_shown for setting in settings if setting is not None)
    )
    kind: dict[str, Any] = (
        {"is_flag": True}
        if declared.item_type is bool
        else {
            "type": _type(declared),
            "multiple": declared.is_repeated,
            "metavar": declared.metavar,
        }
    )
    return SettingOption(
        [declared.flag, declared.name],
        group=declared.group,
        path=declared.path,
        show_default=False,
        hidden=declared.hidden,
        help=declared.help + (f"  [default: {defaults}]" if defaults else ""),
        **kind,
    )


def _type(declared: Setting) -> Any:
    if declared.is_list and not declared.is_repeated:
        return {float: fractions, int: whole_numbers}.get(declared.item_type, names)
    if declared.word is not None:
        return NumberOr(declared.word)
    if declared.choices:
        return click.Choice(declared.choices)
    return _FORMATS.get(declared.format, declared.item_type)
