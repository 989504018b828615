"""`histopipe export`: what a store holds, for other tools."""

from __future__ import annotations

import json
from pathlib import Path

import click

from histopipe.cli.untrusted import untrusted_option
from histopipe.errors import ExitCode, UsageError


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("stores", nargs=-1, type=click.Path())
@click.option(
    "--index",
    type=click.Choice(["csv", "parquet"]),
    help="A table of the patches, one row each, into the file --out.",
)
@click.option(
    "--to",
    type=click.Choice(["tfrecord", "webdataset", "folder"]),
    help="The patches themselves, as they are, into the folder --out.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The file, or the folder."
)
@click.option(
    "--shard-patches", type=int, default=10_000, help="With --to webdataset: patches of a tar file."
)
@click.option("--json", "as_json", is_flag=True, help="What was written as JSON.")
@untrusted_option("stores")
def command(
    *,
    stores: tuple[str, ...],
    index: str | None,
    to: str | None,
    out: Path,
    shard_patches: int,
    as_json: bool,
) -> None:
    """Write the index, or the patches, of STORES (patches.lmdb if none is named) for other tools.

    tfrecord: a file a slide, with slideflow's features. webdataset: tar files of images and JSON. folder: images by label and slide.
    Nothing is decoded or encoded anew. The same command again goes on with the files that are missing.

    \b
    Example: histopipe export patches.lmdb --index parquet --out index.parquet
    Patches: histopipe export patches.lmdb --to webdataset --out shards
    """  # fmt: skip
    if (index is None) == (to is None):
        raise UsageError("export", found="both" if index else "neither", expected="one of --index and --to")  # fmt: skip
    if index is not None:
        from histopipe.export.index import export_index

        rows = export_index(stores or "patches.lmdb", out=out, kind=index)  # type: ignore[arg-type]  # click has checked
        told = {"file": str(out), "rows": rows}
        click.echo(json.dumps(told, indent=2) if as_json else f"{rows:,} patches: {out}")
        return
    from histopipe.export.patches import export_patches

    if len(stores) > 1:
        raise UsageError("--to", found=f"{len(stores)} stores", expected="one, each with its own --out")  # fmt: skip
    store = stores[0] if stores else "patches.lmdb"
    result = export_patches(store, out=out, to=to, shard_patches=shard_patches)  # type: ignore[arg-type]  # click has checked
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        click.echo(
            f"{result.patches:,} patches in {result.files} files, {result.kept} files there before: {out}"
        )
        for problem in result.damaged:
            click.echo(f"left out: {problem}")
    if result.damaged:
        click.get_current_context().exit(ExitCode.PARTLY)
