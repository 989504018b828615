"""`histopipe stains`: how each slide of a store is stained, measured and kept there."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--force", is_flag=True, help="Measure slides anew that have been measured before.")
@untrusted_option("store")
def command(store: Path, force: bool) -> None:
    """Measure how each complete slide of STORE is stained, by 64 of its patches, and keep that in the store.

    Both the mean and deviation in lαβ (Reinhard et al. 2001) and the stain vectors (Macenko et al. 2009) are kept, for
    `histopipe train --stain-norm` and `load_dataset(..., stain_norm=...)`. No patch is changed.
    Exit code 3: some slides show too little tissue to be measured.

    \b
    Example: histopipe stains patches.lmdb
    """
    # Late: `--help` needs none of it.
    from tqdm import tqdm

    from histopipe.dataset.stain_fit import fit_store

    with tqdm(unit=" slides", disable=not sys.stderr.isatty(), leave=False) as bar:

        def done(problem: str | None) -> None:
            bar.update()
            if problem:
                tqdm.write(f"not measured: {problem}", file=sys.stderr)

        measured, failed = fit_store(store, force=force, done=done)
    click.echo(f"{measured} slides measured, {len(failed)} not")
    if failed:
        sys.exit(ExitCode.PARTLY)
