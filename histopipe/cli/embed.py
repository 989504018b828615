"""`histopipe embed`."""

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
    help="Encoder: folder of a run, ONNX file, or keras.applications name such as resnet50.",
)
@click.option(
    "--weights", help="Weights of a named network: none, imagenet, or a file.  [default: imagenet]"
)
@click.option(
    "--out", type=click.Path(), required=True, help="Folder for the feature files, one per slide."
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    help="Precision of the stored features; float16 takes half the space.",
)
@click.option("--batch-size", type=int, default=64, help="Patches per batch, over all devices.")
@click.option("--devices", default="auto", help="auto, cpu, cpu:N, gpu or gpu:0,1.")
@click.option(
    "--stain-norm",
    type=click.Choice(["none", "reinhard", "macenko"]),
    help="Stain normalization.  [default: as the run was trained, else none]",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="Damaged patch: fail its slide, or skip the patch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@untrusted_option("stores")
def command(stores: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compute features of every patch of STORES (default: patches.lmdb) for slide-level models.

    Writes one HDF5 file per slide in the format of CLAM and TRIDENT: features (N, D), and coords (N, 2) in level-0 pixels. Run the
    same command again to embed the slides that are missing. An ONNX file needs a JSON file of the same name with mean, std and size.

    \b
    Example: histopipe embed patches.lmdb --model resnet50 --out features
    """  # fmt: skip
    from histopipe.inference.embed import embed  # late: `--help` needs no numpy

    result = embed(stores or "patches.lmdb", **options)
    click.echo(json.dumps(result.to_json(), indent=2) if as_json else str(result))
    if result.failed:
        some = bool(result.done or result.kept)
        click.get_current_context().exit(ExitCode.PARTLY if some else ExitCode.NOTHING)
