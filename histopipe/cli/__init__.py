"""The command line. A command parses its flags, calls one function of the library, and prints.

A command imports that function when it runs, so that `--help` and wrong flags answer at once.
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
        "ingest": ("ingestion", "Tile slides into a store."),
        "import-coords": ("ingestion", "Tile slides at the coordinates of CLAM or TRIDENT."),
        "info": ("maintenance", "Show the contents of a store."),
        "verify": ("maintenance", "Verify the integrity of a store."),
        "repair": ("maintenance", "Ingest the damaged slides of a store again."),
        "merge": ("maintenance", "Copy several stores into one."),
        "remove": ("maintenance", "Remove slides from a store."),
        "split": ("maintenance", "Copy a store into one store per side of a split."),
        "compact": ("maintenance", "Free the disk space of removed slides."),
        "annotate": ("maintenance", "Label patches from annotations."),
        "quality": ("maintenance", "Measure focus, pen marks and folds of every patch."),
        "stains": ("maintenance", "Fit the stain of each slide of a store."),
        "train": ("training", "Train a model on a store or on features."),
        "tune": ("training", "Search for settings with a better validation metric."),
        "compare": ("training", "Compare runs."),
        "predict": ("inference", "Predict stores or slides with the model of a run."),
        "embed": ("inference", "Compute features of every patch of a store."),
        "heatmap": ("reports", "Draw predictions or attention over their slides."),
        "report": ("reports", "Write a report of a store or a run as one HTML page."),
        "export": ("reports", "Export the index or the patches of a store for other tools."),
        "demo": ("machine", "Run the full pipeline on synthetic slides."),
        "doctor": ("machine", "Check this machine and installation."),
        "bench": ("machine", "Measure the input of a training, and name the bottleneck."),
    }
)
"""The module and the line in `histopipe --help` of each command."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__name__}.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


# Commands inherit these settings.
@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
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
    except BrokenPipeError:  # the reader of the output has ended
        sys.stderr.close()
        sys.exit(ExitCode.DONE)
