"""The command line: one module a command, each parses, makes one library call, and prints.

Commands are imported when they are called, so that `--help` and wrong flags answer at once.
"""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
from types import MappingProxyType

import click

from histopipe._version import __version__
from histopipe.errors import ExitCode, HistopipeError

COMMANDS = MappingProxyType(
    {
        "ingest": "Tile slides into a store.",
        "import-coords": "Tile slides where CLAM or TRIDENT chose to.",
        "info": "Tell what a store holds.",
        "verify": "Look whether a store is what was written.",
        "repair": "Ingest again what is damaged in a store.",
        "merge": "Copy several stores into one.",
        "remove": "Take slides out of a store.",
        "split": "Copy a store's slides into one store a side.",
        "compact": "Give back the room that removals left.",
        "annotate": "Give patches the classes that are drawn on their slides.",
        "quality": "Measure focus, pen marks and folds of every patch.",
        "train": "Train a patch model on a store.",
        "predict": "Predict stores or slides by a run's model.",
        "report": "Write a store or a run as one HTML page.",
        "heatmap": "Draw predictions or attention over their slides.",
        "embed": "Compute features of every patch of a store.",
        "tune": "Search for settings that do better on validation.",
        "export": "Write a store's index or patches for other tools.",
        "compare": "Hold runs against each other.",
        "stains": "Measure how each slide of a store is stained.",
        "demo": "Everything once, on made slides: ends with a report.",
        "doctor": "Look at this machine and installation.",
        "bench": "Measure what feeds a training, and name the bottleneck.",
    }
)
"""Every command with its line in `histopipe --help`. The module of each has its name, with underscores."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)  # noqa: S101 - our own modules, not a user's input
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="histopipe")
def histopipe() -> None:
    """From whole-slide images to a trained patch model.

    `histopipe ingest slides/` tiles slides into patches.lmdb; `histopipe train` trains on it.
    Results go to standard output, progress and messages to standard error.

    Exit codes: 0 done, 2 wrong command line or CSV, 3 partly done, 4 nothing could be done,
    5 damaged store or run, 6 out of disk or memory or a worker lost, 130 interrupted.
    """


def main() -> None:
    """Entry point of the `histopipe` script."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is a Ctrl-C
    try:
        sys.exit(histopipe.main(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(ExitCode.USAGE)
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
            "histopipe: interrupted; what was complete stays, run the same command to go on",
            err=True,
        )
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away: nothing to say, nobody to say it to
        sys.exit(ExitCode.DONE)
