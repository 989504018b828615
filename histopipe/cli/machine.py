"""Commands that test this machine and installation: `demo`, `doctor`, `bench`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

import histopipe
from histopipe.cli.parameters import (
    PATH,
    json_option,
    show,
    store_argument,
    stores_argument,
    untrusted_option,
)


@click.command()
@click.option("--out", type=PATH, default="demo", help="Folder for all results.")
@click.option(
    "--slides", is_flag=True, help="Train a slide model on features, from labels of slides."
)
@click.option("--count", type=int, default=40, help="Number of synthetic slides to train on.")
def demo(out: Path, slides: bool, count: int) -> None:
    """Run the full pipeline on synthetic slides.

    Creates slides of tissue with outlined tumour, ingests them, trains on the outlines, predicts new slides, and writes
    reports. With --slides: computes features, trains a slide model on labels, and predicts new slides from their files.
    Needs TensorFlow, but no data and no network. Takes about a minute on 2 cores.

    \b
    Example: histopipe demo --out demo
    """
    from histopipe.demo.demo import demo

    show(demo(out, slides=slides, count=count), then=("ingest", "SLIDES"))


@click.command()
@store_argument
@json_option("all results")
def doctor(store: Path, as_json: bool) -> int:
    """Check this machine and installation, and the disk of STORE, which need not exist yet.

    Checks Python, libraries, slide formats, TensorFlow and its GPUs (a matrix product on each), NVIDIA's driver, disk,
    filesystem and limits, and shows how to fix problems. Exit code 6: a check failed.

    \b
    Example: histopipe doctor /data/patches.lmdb
    """
    report = histopipe.doctor(store)
    return show(report, as_json=as_json, then=() if report.exit_code else ("demo",))


@click.command()
@stores_argument
@click.option("--batch-size", type=click.IntRange(1), default=64, help="Patches per batch.")
@click.option("--seconds", type=float, default=2.0, help="Seconds for each of about eight stages.")
@click.option("--model", help="Also measure training steps of this model.")
@click.option("--devices", default="auto", help="Devices for --model, as for `histopipe train`.")
@json_option()
@untrusted_option("stores")
def bench(stores: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Measure disk, LMDB, decoder, reader and (with --model) device on STORES, and recommend settings.

    Rates are in patches per second. Disk reads bypass the page cache.

    \b
    Example: histopipe bench patches.lmdb --model resnet50
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is loaded
    paths = list(stores) or [Path("patches.lmdb")]
    show(histopipe.bench(paths, **options), as_json=as_json, then=("train", *paths))
