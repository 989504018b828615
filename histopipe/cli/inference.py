"""Commands that apply a network to patches: `predict`, `embed`, `encoders`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import histopipe
from histopipe.cli.parameters import (
    PATH,
    SOURCE,
    json_option,
    show,
    stores_argument,
    untrusted_option,
)
from histopipe.cli.setting_options import SettingsCommand, setting_options
from histopipe.inference.options import EmbedOptions, PredictSettings
from histopipe.system.result import exit_code_of


@click.command(cls=SettingsCommand)
@click.argument("run", type=PATH)
@click.argument("sources", nargs=-1, required=True, type=SOURCE)
@click.option("--out", type=PATH, required=True, help="Folder for the predictions.")
@setting_options(PredictSettings)
@json_option()
@untrusted_option("sources")
def predict(
    run: Path, sources: tuple[Path | str, ...], out: Path, as_json: bool, **options: Any
) -> int:
    """Predict SOURCES (stores, slides, or features) with the model in the run folder RUN.

    Slides need no store: they are tiled like the training slides, and their patches are not stored. A slide model also
    computes their features, or takes folders of features. If RUN is a cross-validation, its folds are averaged. Writes a
    CSV file of patches per slide, slides.csv and patients.csv. Run the same command again to predict missing slides.

    \b
    Example: histopipe predict runs/first new-slides/ --out predictions
    """
    result = histopipe.predict(run, sources, out=out, **options)
    show(result, as_json=as_json, then=("heatmap", out) if result.done or result.kept else ())
    return exit_code_of(len(result.failed), len(result.done) + len(result.kept))


@click.command(cls=SettingsCommand)
@stores_argument
@click.option(
    "--out", type=click.Path(), required=True, help="Folder for the feature files, one per slide."
)
@setting_options(EmbedOptions)
@json_option()
@untrusted_option("stores", model="model")
def embed(stores: tuple[Path, ...], out: str, as_json: bool, **options: Any) -> int:
    """Compute features of every patch of STORES (default: patches.lmdb) for slide-level models.

    Writes one HDF5 file per slide in the format of CLAM and TRIDENT: features (N, D), and coords (N, 2) in level-0
    pixels. Run the same command again to embed missing slides. `histopipe encoders` lists foundation models. An ONNX
    file needs a JSON file with the same name and with mean, std and size.

    \b
    Example: histopipe embed patches.lmdb --model uni --weights uni/ --out features
    """
    result = histopipe.embed(stores or "patches.lmdb", out=out, **options)
    show(
        result,
        as_json=as_json,
        then=("train", "--mil", out) if result.done or result.kept else (),
    )
    return exit_code_of(len(result.failed), len(result.done) + len(result.kept))


@click.command()
@click.argument("name", required=False)
@json_option()
def encoders(name: str | None, as_json: bool) -> None:
    """List the encoders (foundation models) for --model of embed and train, or show NAME in detail.

    The details are the expected patches, the licence, and the commands that download the weights. histopipe does not
    download them itself.

    \b
    Example: histopipe encoders uni
    """
    show(histopipe.encoders(name), as_json=as_json, then=() if name else ("encoders", "NAME"))
