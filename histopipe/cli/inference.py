"""Commands that apply a network to patches: `predict`, `embed`, `encoders`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import (
    PATH,
    SOURCE,
    NumberOr,
    batch_size_option,
    devices_option,
    extra_rows_option,
    json_option,
    na_option,
    names,
    share,
    show,
    stage_options,
    stores_argument,
    untrusted_option,
)
from histopipe.system.result import exit_code_of


@click.command()
@click.argument("run", type=PATH)
@click.argument("sources", nargs=-1, required=True, type=SOURCE)
@click.option("--out", type=PATH, required=True, help="Folder for the predictions.")
@batch_size_option
@devices_option
@click.option(
    "--aggregate",
    type=click.Choice(["mean", "top_k", "majority"]),
    default="mean",
    help="Aggregation of patches to slides and patients.",
)
@click.option(
    "--labels",
    type=PATH,
    help="CSV file with the columns slide, label, and optionally patient; for slide models also targets and "
    "covariates. Metrics are reported where labels are known.  [default: the store's]",
)
@na_option
@extra_rows_option
@click.option(
    "--subgroup",
    type=names,
    help="Columns of --labels by which metrics are reported, as for `train`.  [default: those of the training]",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="Damaged patch in a store: fail its slide (raise), or leave the patch out (skip).",
)
@click.option("--images", is_flag=True, help="Slide files: take only images, as `ingest` does.")
@click.option(
    "--overlap", type=int, help="Slide files: overlap of patches in pixels.  [default: as trained]"
)
@click.option(
    "--tissue",
    type=click.Choice(["otsu", "none"]),
    help="Slide files: tissue detection.  [default: as trained]",
)
@click.option(
    "--tissue-threshold",
    type=share,
    help="Slide files: minimum share of tissue in a patch.  [default: as trained]",
)
@click.option(
    "--mpp-csv", type=PATH, help="CSV: slide,mpp. Takes precedence over the scale of slide files."
)
@click.option(
    "--default-mpp", type=float, help="Level-0 µm per pixel of slide files without scale."
)
@click.option(
    "--max-unreadable",
    type=share,
    default="1%",
    help="Slide files: maximum share of unreadable patches.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Number of processes that read slide files.  [default: one per core]",
)
@stage_options
@click.option(
    "--encoder",
    multiple=True,
    help="Slide model: its encoder, if it has moved; once per feature set.  [default: as recorded]",
)
@click.option(
    "--encoder-weights",
    multiple=True,
    help="Slide model: weights of its encoder, if they have moved.  [default: as recorded]",
)
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
    from histopipe.inference.predict import predict

    options["subgroup"] = options["subgroup"] or ()
    result = predict(run, sources, out=out, **options)
    show(result, as_json=as_json, then=("heatmap", out) if result.done or result.kept else ())
    return exit_code_of(len(result.failed), len(result.done) + len(result.kept))


@click.command()
@stores_argument
@click.option(
    "--model",
    help="Encoder: efficientnet-lite0 (default), a name of `histopipe encoders`, a run's folder, a keras.applications name, an ONNX or .keras file, "
    "a SavedModel folder, or module.py:function.",
)
@click.option(
    "--weights",
    help="Weights of a named encoder: a file or folder; else imagenet (default) or none.",
)
@click.option(
    "--allow-mismatch",
    is_flag=True,
    help="Embed even if the patches have another size or scale than the encoder was trained on.",
)
@click.option(
    "--out", type=click.Path(), required=True, help="Folder for the feature files, one per slide."
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "mixed_bfloat16", "mixed_float16"]),
    default="float32",
    help="Precision of the network.",
)
@click.option("--xla", is_flag=True, help="Compile the network with XLA; the first batch is slow.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    help="Type of the stored features; float16 needs half the space.",
)
@click.option(
    "--batch-size",
    type=NumberOr("auto"),
    default="64",
    help="Patches per batch, over all devices; auto: the fastest that fits into memory.",
)
@devices_option
@click.option(
    "--stain-norm",
    type=click.Choice(["none", "reinhard", "macenko"]),
    help="Stain normalization.  [default: method of the run, else none]",
)
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    help="Damaged patch: fail its slide (raise), or leave the patch out (skip).",
)
@json_option()
@untrusted_option("stores", model="model")
def embed(stores: tuple[Path, ...], as_json: bool, **options: Any) -> int:
    """Compute features of every patch of STORES (default: patches.lmdb) for slide-level models.

    Writes one HDF5 file per slide in the format of CLAM and TRIDENT: features (N, D), and coords (N, 2) in level-0
    pixels. Run the same command again to embed missing slides. `histopipe encoders` lists foundation models. An ONNX
    file needs a JSON file with the same name and with mean, std and size.

    \b
    Example: histopipe embed patches.lmdb --model uni --weights uni/ --out features
    """
    from histopipe.inference.embed import embed

    result = embed(stores or "patches.lmdb", **options)
    show(
        result,
        as_json=as_json,
        then=("train", "--mil", options["out"]) if result.done or result.kept else (),
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
    from histopipe.pretrained.encoders import encoders

    show(encoders(name), as_json=as_json, then=() if name else ("encoders", "NAME"))
