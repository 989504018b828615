"""Making a store sound without its slides: what is no slide's goes, and what was a slide's is kept and hidden."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore, UsageError
from histopipe.maintenance.damage import Damage
from histopipe.store.claims import Claims
from histopipe.store.data_file import DataFile
from histopipe.store.deletion import delete_entries
from histopipe.store.environment import Environment
from histopipe.store.folder import open_for_change
from histopipe.store.format import MAX_SLIDE_NUMBER, META, SLIDES, slide_key, to_json
from histopipe.store.meta import read_meta
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.salvage import salvage
from histopipe.store.structure import Structure


def rewrite(store: Path, part: Path, damage: Damage, records: Mapping[int, SlideRecord]) -> None:
    """Write all that can be read of a store's file into a new one, that of damaged slides too: it goes when they are back.

    Args:
        store: nobody may be writing it.
        part: an empty folder.
        damage: of the store.
        records: of the store's slides, by number.

    Raises:
        UsageError: it was written since it was looked at.
    """
    known = {**records, **{number: lost.record for number, lost in damage.lost.items()}}
    with DataFile(store / "data.mdb") as file:
        state = max((m for m in file.metas if m is not None), key=lambda meta: meta.transaction)
        if state.transaction != damage.transaction:
            raise UsageError(f"{store} was written meanwhile", todo="run the same command again")
        structure = Structure(file, state)
        structure.read_databases()
        salvage(structure, part, known, known.keys() - damage.strays, damage.next_number)


def mend(store: Path, damage: Damage) -> None:
    """Delete what is no slide's, and hide slides whose records are lost, in a file that is whole and that others may write."""
    environment = open_for_change(store)
    try:
        with Claims(store) as claims:
            for number in sorted(damage.strays):
                if claims.take(number) and not _is_slide(environment, store, number):
                    delete_entries(environment, number)
        environment.change(partial(_mend_entries, environment, store, damage))
    finally:
        environment.close()


def _is_slide(environment: Environment, store: Path, number: int) -> bool:
    """Whether a number has a slide by now, that has not failed."""
    with environment.read() as transaction:
        value = transaction.get(slide_key(number), db=environment.databases[SLIDES]) or b""
    try:
        record = SlideRecord.from_bytes(number, value, where=str(store))
    except DamagedStore:
        return False
    return record.state is not SlideState.FAILED


def _mend_entries(environment: Environment, store: Path, damage: Damage, transaction: Any) -> None:
    for database, key in damage.entries:
        held = environment.database(database.encode(), transaction)
        transaction.delete(bytes.fromhex(key), db=held)
    slides = environment.database(SLIDES, transaction)
    for number, lost in damage.lost.items():
        transaction.put(slide_key(number), lost.record.to_bytes(number), db=slides)
    now = read_meta(transaction, environment.databases, "next_number", int, store)
    # An ingest may have given out numbers since the store was looked at.
    now = now if now <= MAX_SLIDE_NUMBER else 0
    transaction.put(
        b"next_number",
        to_json(max(now, damage.next_number)),
        db=environment.database(META, transaction),
    )
