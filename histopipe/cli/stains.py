"""`histopipe stains`: fit the stain of each slide of a store."""

from __future__ import annotations

from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("store", type=click.Path(path_type=Path), default="patches.lmdb")
@click.option("--force", is_flag=True, help="Fit slides again that have a fit.")
@untrusted_option("store")
def command(store: Path, force: bool) -> int:
    """Fit the stain of each complete slide of STORE on 64 of its patches, and keep the fits in the store.

    Both fits are kept, mean and deviation in lαβ (Reinhard et al. 2001) and stain vectors (Macenko et al. 2009), for
    `histopipe train --stain-norm` and `load_dataset(..., stain_norm=...)`. No patch is changed.
    Exit code 3: some slides have too little tissue.

    \b
    Example: histopipe stains patches.lmdb
    """
    from histopipe.measure.stains import stains  # late: `--help` needs none of it

    result = stains(store, force=force)
    click.echo(repr(result))
    return result.exit_code
