"""`histopipe embed`: a store into features."""

from __future__ import annotations

import json
from typing import Any

import click

from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("stores", nargs=-1, type=click.Path())
@click.option(
    "--model",
    required=True,
    help="A run's folder, an ONNX file, or a keras.applications name such as resnet50.",
)
@click.option(
    "--weights", help="Of a named network: none, imagenet, or a file.  [default: imagenet]"
)
@click.option("--out", type=click.Path(), required=True, help="Folder for the files, one a slide.")
@click.option(
    "--precision",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    help="Of the features as they are stored; float16 takes half the room.",
)
@click.option("--batch-size", type=int, default=64, help="Patches at once, over all devices.")
@click.option("--devices", default="auto", help="auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option(
    "--stain-norm",
    type=click.Choice(["none", "reinhard", "macenko"]),
    help="Give all slides one stain first.  [default: as the run was trained, else none]",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="What a damaged patch does: fail its slide, or be left out.",
)
@click.option("--json", "as_json", is_flag=True, help="What was done as JSON.")
@untrusted_option("stores")
def command(stores: tuple[str, ...], as_json: bool, **settings: Any) -> None:
    """Compute features of every patch of STORES (patches.lmdb if none is named), once, for slide-level models.

    One HDF5 file a slide, as CLAM and TRIDENT read them: features (N, D) and coords (N, 2) in level-0 pixels. The same command again
    does the slides that are missing. An ONNX file needs a JSON file of its name beside it, with mean, std and size.

    \b
    Example: histopipe embed patches.lmdb --model resnet50 --out features
    """  # fmt: skip
    from histopipe.inference.embed import embed

    result = embed(stores or "patches.lmdb", **settings)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        if result.skipped:
            click.echo(f"{result.skipped} damaged patches left out")
        waiting = result.input_wait / result.seconds if result.seconds else 0.0
        click.echo(
            f"{len(result.done)} slides embedded, {len(result.kept)} there before, {len(result.failed)} failed; "
            f"{result.patches:,} patches of {result.dimension} features in {result.seconds:.0f} s, "
            f"{waiting:.0%} waiting for input: {result.folder}"
        )
        for name, reason in result.failed.items():
            click.echo(f"failed: {name}: {reason}")
    if result.failed:
        nothing = not (result.done or result.kept)
        click.get_current_context().exit(ExitCode.NOTHING if nothing else ExitCode.PARTLY)
