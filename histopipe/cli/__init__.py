"""Command line. Each command parses its flags, calls the public function of its name and prints the result.

`import histopipe` imports a function when it is first used, so that `--help` and wrong flags respond immediately.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from types import MappingProxyType
from typing import Any, cast

import click

from histopipe import REMOVED
from histopipe._version import __version__
from histopipe.cli.config_option import config_option
from histopipe.cli.parameters import discard_output
from histopipe.errors import ExitCode, HistopipeError

GROUPS = MappingProxyType(
    {
        "Data": {
            "init": ("training", "Write the file of a study, with settings for each command."),
            "cohort": ("stores", "Make a labels file from the tables of an archive."),
            "tissue": ("stores", "Write tissue masks to check and to correct."),
            "ingest": ("stores", "Tile slides into a store."),
            "import-coords": ("stores", "Tile slides at the coordinates of CLAM or TRIDENT."),
            "annotate": ("stores", "Label patches from annotations."),
            "quality": ("stores", "Measure focus, pen marks and folds of every patch."),
            "stains": ("stores", "Fit the stain of each slide of a store."),
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
