"""Command line. Each command parses its flags, calls the public function of its name and prints the result.

`import histopipe` imports a function when it is first used, so that `--help` and wrong flags respond immediately.

Flags are also set by the TOML file of a study, which has a table for each command; see `histopipe init`. The names in a
table are those of the flags, with underscores, and of the arguments. A value becomes the text of its flag, so that the
command checks both alike.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import click

from histopipe import REMOVED
from histopipe._version import __version__
from histopipe.cli.parameters import LISTS, PATH, SETTINGS_FILE, F, discard_output, path_or_url
from histopipe.errors import ExitCode, HistopipeError, UsageError
from histopipe.system.settings import ANY_PATH, absolute_path, check_known, read_toml

GROUPS = MappingProxyType(
    {
        "Data": {
            "init": ("training", "Write the file of a study, with settings for each command."),
            "cohort": ("stores", "Make a labels file from the tables of an archive."),
            "tissue": ("stores", "Write tissue masks, or cores of arrays, to correct."),
            "ingest": ("stores", "Tile slides into a store."),
            "import-coords": ("stores", "Tile slides at the coordinates of CLAM or TRIDENT."),
            "annotate": ("stores", "Label patches from annotations."),
            "quality": ("stores", "Measure focus, pen marks and folds of every patch."),
            "stains": ("stores", "Fit the stain of each slide, or measure amounts."),
            "info": ("stores", "Show the contents of a store or a folder of results."),
            "export": ("analysis", "Export patches, an index, masks, models or features."),
        },
        "Training": {
            "train": ("training", "Train a model on a store or on features."),
            "tune": ("training", "Search for settings with a better validation metric."),
            "encoders": ("analysis", "List foundation models, and where to get their weights."),
            "embed": ("analysis", "Compute features of every patch of stores or slides."),
            "probe": ("training", "Compare encoders by simple models of their features."),
        },
        "Analysis": {
            "predict": ("analysis", "Predict stores or slides with the model of a run."),
            "view": ("analysis", "Show slides, patches and predictions in a browser."),
            "heatmap": ("analysis", "Draw heatmaps of predictions or attention over slides."),
            "report": ("analysis", "Write a report of a store, run or predictions as HTML."),
            "compare": ("analysis", "Compare runs."),
        },
        "Maintenance": {
            "verify": ("stores", "Verify the integrity of a store."),
            "repair": ("stores", "Ingest the damaged slides of a store again."),
            "merge": ("stores", "Copy several stores, or some of their slides, into one."),
            "remove": ("stores", "Remove slides from a store, and free their disk space."),
            "doctor": ("stores", "Check this machine and installation."),
            "demo": ("stores", "Run the full pipeline on synthetic slides."),
        },
    }
)
"""Commands by group, each with its module and its line in `histopipe --help`."""
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}")
        command = cast(click.Command, getattr(module, cmd_name.replace("-", "_")))
        if all(parameter.name != "config" for parameter in command.params):
            config_option()(command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the process that reads the messages has ended
            discard_output(1, 2)
            return 128 + signal.SIGPIPE

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] in REMOVED:
            ctx.fail(f"`histopipe {args[0]}` was removed in 0.3: use {REMOVED[args[0]]}")
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if near:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), summary) for name, (_, summary) in commands.items()]
                )


# Commands inherit these settings.
@click.group(
    cls=_Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 120,
    },
)
@click.version_option(__version__, prog_name="histopipe")
def histopipe() -> None:
    """Train models on whole-slide images.

    `histopipe ingest slides/` tiles slides into patches.lmdb; `histopipe train` trains on it.
    Results go to standard output, progress and messages to standard error.

    Exit codes: 0 done, 2 wrong command line or CSV, 3 partly done, 4 nothing could be done,
    5 damaged store or run, 6 out of disk or memory or a worker lost, 130 interrupted.
    """


def main() -> None:
    """Entry point of the `histopipe` script."""
    _open_closed_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # schedulers stop jobs by SIGTERM
    try:
        sys.exit(histopipe.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except HistopipeError as error:
        if error.exit_code is ExitCode.BUG:
            traceback.print_exc()
        click.echo(f"histopipe: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.exceptions.Abort):
        click.echo(
            "histopipe: interrupted; completed work is kept; run the same command to continue",
            err=True,
        )
        sys.exit(ExitCode.INTERRUPTED)
    except OSError as error:
        from histopipe.system.files import is_full_disk

        if not is_full_disk(error):
            raise
        click.echo(f"histopipe: {error}; free disk space, or allow larger files", err=True)
        discard_output(1)
        sys.exit(ExitCode.SHORT)


def _open_closed_streams() -> None:
    """Open standard streams that the caller has closed. Otherwise files would get their numbers, and their output."""
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115


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
