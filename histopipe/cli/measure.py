"""Commands that measure the patches or slides of a store: `annotate`, `quality`, `stains`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import (
    PATH,
    annotation_options,
    json_option,
    show,
    show_text,
    store_argument,
    untrusted_option,
    workers_option,
)


@click.command()
@click.argument("store", type=PATH)
@click.argument("annotations", type=PATH)
@annotation_options
@workers_option
@json_option()
@untrusted_option("store")
def annotate(store: Path, annotations: Path, as_json: bool, **options: Any) -> int:
    """Label the patches of STORE from the files in the folder ANNOTATIONS.

    Files have the names of slides: SLIDE.geojson (QuPath), SLIDE.xml (ASAP, Aperio ImageScope). Where outlines of several
    classes overlap, the smallest one counts. The patches are not changed. `histopipe train --labels-from annotation` trains
    on these classes.

    \b
    Example: histopipe annotate patches.lmdb annotations/
    """
    from histopipe.measure.annotate import annotate

    result = annotate(store, annotations, **options)
    of_slides = [f"{name}: {note}" for name, it in sorted(result.done.items()) for note in it]
    show(result, as_json=as_json, notes=[*result.notes, *of_slides])
    return result.exit_code


@click.command()
@store_argument
@click.option("--force", is_flag=True, help="Measure slides again that were measured before.")
@workers_option
@json_option()
@untrusted_option("store")
def quality(store: Path, as_json: bool, **options: Any) -> int:
    """Measure focus, pen marks, folds and black of every patch of STORE, and add them to its index.

    focus is the variance of the Laplacian at 1 µm per pixel; pen and dark (folded or black) are shares of the patch. No patch
    is changed or removed: `histopipe train --min-focus 50 --exclude-pen 5%` leaves patches out, and another threshold needs no
    other ingest. The table shows medians.

    \b
    Example: histopipe quality patches.lmdb
    """
    from histopipe.measure.quality import quality

    result = quality(store, **options)
    show(result, as_json=as_json)
    return result.exit_code


@click.command()
@store_argument
@click.option("--force", is_flag=True, help="Fit slides again that have a fit.")
@untrusted_option("store")
def stains(store: Path, force: bool) -> int:
    """Fit the stain of each complete slide of STORE on 64 of its patches, and keep the fits in the store.

    Both fits are kept, mean and deviation in lαβ (Reinhard et al. 2001) and stain vectors (Macenko et al. 2009), for
    `histopipe train --stain-norm` and `load_dataset(..., stain_norm=...)`. No patch is changed.
    Exit code 3: some slides have too little tissue.

    \b
    Example: histopipe stains patches.lmdb
    """
    from histopipe.measure.stains import stains

    result = stains(store, force=force)
    show_text(str(result))
    return result.exit_code
