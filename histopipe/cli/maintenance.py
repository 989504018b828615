"""Commands that read, verify or rewrite a store: `info`, `verify`, `repair`, `merge`, `remove`, `split`, `compact`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from histopipe.cli.parameters import (
    PATH,
    annotation_options,
    json_option,
    network_option,
    show,
    show_json,
    show_text,
    store_argument,
    untrusted_option,
    workers_option,
)


@click.command()
@store_argument
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, slide by slide.")
@untrusted_option("store")
def info(store: Path, as_json: bool) -> None:
    """Show the contents of STORE: slides by state, patches, bytes, scales, labels and settings.

    \b
    Example: histopipe info patches.lmdb
    """
    from histopipe.maintenance.info import info

    show(info(store), as_json=as_json)


@click.command()
@store_argument
@click.option("--full", is_flag=True, help="Decode every patch and picture, too.")
@click.option(
    "--untrusted",
    is_flag=True,
    help="Treat the store as untrusted: verify its pages before LMDB opens it.",
)
@workers_option
@json_option("all findings")
def verify(store: Path, as_json: bool, **options: Any) -> int:
    """Verify the integrity of STORE: the file's structure, its format, every record, index and value.

    Each value's checksum includes its key, so that swapped values are found. Nothing is written. A damaged file cannot crash
    the command. Exit code 5: something is wrong; `histopipe repair` repairs it.

    \b
    Example: histopipe verify patches.lmdb --full
    """
    from histopipe.maintenance.verify import verify

    found = verify(store, **options)
    show(found, as_json=as_json)
    return found.exit_code


@click.command()
@click.argument("store", type=PATH)
@click.argument("slides", nargs=-1, required=True, type=PATH)
@click.option(
    "--annotations",
    type=PATH,
    help="Outlines, as for ingest.  [default: patches keep their classes where these are intact]",
)
@annotation_options
@click.option("--full", is_flag=True, help="Decode every patch and picture, too.")
@workers_option
@network_option
@json_option()
def repair(store: Path, slides: tuple[Path, ...], as_json: bool, **options: Any) -> int:
    """Verify STORE, and ingest its damaged slides again from SLIDES, files or folders.

    Only damaged slides are touched. They keep their numbers, labels, stain fits and what was measured of their patches. If the
    file itself is damaged, all that can be read is copied into a new one first. After an interruption, run the same command
    again. Exit code 3: some slides could not be repaired; 5: something else is still wrong.

    \b
    Example: histopipe repair patches.lmdb slides/
    """
    from histopipe.maintenance.repair import repair

    done = repair(store, slides, **options)
    left = [f"{name} could not be repaired: {why}" for name, why in done.left.items()]
    remaining = [f"still wrong: {what}" for what in done.remaining]
    show(done, as_json=as_json, notes=[*done.notes, *left, *remaining])
    return done.exit_code


@click.command()
@click.argument("stores", nargs=-1, required=True, type=PATH)
@click.option(
    "--out",
    required=True,
    type=PATH,
    help="The merged store. It is made if missing, else slides are added.",
)
@network_option
@json_option()
@untrusted_option("stores")
def merge(stores: tuple[Path, ...], out: Path, allow_network: bool, as_json: bool) -> None:
    """Copy the slides of STORES, or of folders of stores (*.lmdb), into one store.

    The stores' settings must be equal. Of a slide that several stores have, the first one's is taken, with a note. Every value
    is compared with its checksum. After an interruption, run the same command again. Slides get new numbers, so resume a run
    on the stores that it began with.

    \b
    Example: histopipe merge node1.lmdb node2.lmdb --out patches.lmdb
    """
    from histopipe.maintenance.merge import merge

    copied = merge(stores, out, allow_network=allow_network)
    if as_json:
        show_json([copied.to_json()])
    else:
        show(copied, as_json=False, notes=copied.notes)


@click.command()
@click.argument("store", type=PATH)
@click.argument("slides", nargs=-1, required=True)
@untrusted_option("store")
def remove(store: Path, slides: tuple[str, ...]) -> None:
    """Remove SLIDES from STORE by their ids (see `histopipe info`), with everything that is stored of them.

    Interrupted at any moment, each slide is either complete or removed. If one id is unknown, no slide is removed. The file
    keeps its length until `histopipe compact`; later writes use the free space first. Numbers of removed slides are not used
    again.

    \b
    Example: histopipe remove patches.lmdb slide-17 slide-18
    """
    from histopipe.maintenance.remove import remove

    show_text(str(remove(store, slides)))


@click.command()
@click.argument("stores", nargs=-1, required=True, type=PATH)
@click.option("--splits", required=True, type=PATH, help="The splits.json of a run on STORES.")
@click.option(
    "--out",
    required=True,
    type=PATH,
    help="Folder for train.lmdb, validation.lmdb and test.lmdb.",
)
@network_option
@json_option()
@untrusted_option("stores")
def split(
    stores: tuple[Path, ...], splits: Path, out: Path, allow_network: bool, as_json: bool
) -> None:
    """Copy the slides of STORES into one store per side of a split. Slides without a side are left out.

    A split by region or patch is refused, because slides are copied whole. After an interruption, run the same command again.

    \b
    Example: histopipe split patches.lmdb --splits runs/first/splits.json --out sides
    """
    from histopipe.maintenance.split import split

    copied = split(stores, splits, out, allow_network=allow_network)
    notes = [note for side in copied.sides.values() for note in side.notes]
    show(copied, as_json=as_json, notes=notes)


@click.command()
@store_argument
@click.option("--out", type=PATH, help="Write the copy there, and leave STORE as it is.")
@untrusted_option("store")
def compact(store: Path, out: Path | None) -> None:
    """Copy STORE without its free pages, and replace it by the copy.

    The disk needs room for the copy. Trainings that read the store continue with the old file. No process may have it open for
    writing. Interrupted at any moment, the store is as before.

    \b
    Example: histopipe compact patches.lmdb
    """
    from histopipe.maintenance.compact import compact

    show_text(str(compact(store, out)))
