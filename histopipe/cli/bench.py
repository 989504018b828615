"""`histopipe bench`: measure what feeds a training, stage by stage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("stores", nargs=-1, type=click.Path(path_type=Path))
@click.option("--batch-size", type=click.IntRange(1), default=64, help="Patches per batch.")
@click.option("--seconds", type=float, default=2.0, help="Seconds for each of about eight stages.")
@click.option("--model", help="Also measure training steps of this model.")
@click.option("--devices", default="auto", help="Devices for --model, as for `histopipe train`.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@untrusted_option("stores")
def command(  # noqa: PLR0917 - click passes them by name
    stores: tuple[Path, ...],
    batch_size: int,
    seconds: float,
    model: str | None,
    devices: str,
    as_json: bool,
) -> None:
    """Measure disk, LMDB, decoder, reader and (with --model) device on STORES, and recommend settings.

    Rates are patches per second. The disk is read past the page cache, so the cache need not be dropped.

    \b
    Example: histopipe bench patches.lmdb --model resnet50
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is loaded
    # Late: `--help` needs none of it.
    from histopipe.training.bench import bench

    result = bench(
        list(stores) or [Path("patches.lmdb")],
        batch_size=batch_size,
        seconds=seconds,
        model=model,
        devices=devices,
    )
    click.echo(json.dumps(result.to_json(), indent=2) if as_json else str(result))
