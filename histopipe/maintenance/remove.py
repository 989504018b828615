"""Taking slides out of a store."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.maintenance.finding import some
from histopipe.store.claims import Claims
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter

Told = Callable[[int, int], None]
"""Called with the slides that are gone, and with all that will be."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What was taken out, and the bytes that are now free inside the file, also by earlier removals."""

    store: str
    slides: list[str]
    patches: int
    reusable_bytes: int


def remove(store: str | Path, slides: Sequence[str], *, told: Told = lambda *_: None) -> Removed:
    """Take slides out of a store, with all that is stored of them: each is there or gone, whenever this ends.

    Args:
        store: the store's folder.
        slides: ids. Nothing is taken out if one is not known.
        told: hears how far it is.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be written.
        UsageError: a slide is not in the store, or an ingest is at it.
    """
    store = Path(store)
    with Store(store) as opened:
        spec = opened.spec
        numbers = {record.id: number for number, record in opened.records.items()}
        planned = {record.id: record.planned for record in opened.slides}
    wanted = list(dict.fromkeys(slides))
    unknown = [name for name in wanted if name not in numbers]
    if unknown:
        raise UsageError(
            f"{store} has no such slide", found=some(unknown),
            expected=some(difflib.get_close_matches(unknown[0], numbers) or numbers) or "any slide",
        )  # fmt: skip
    with StoreWriter(store, spec) as writer, Claims(store) as claims:
        for count, name in enumerate(wanted):
            if not claims.take(numbers[name]):
                raise UsageError(
                    f"an ingest is at slide {name} of {store}", todo="wait until it is done"
                )
            writer.remove(numbers[name])
            claims.release(numbers[name])
            told(count + 1, len(wanted))
        free = writer.reusable_bytes()
    return Removed(str(store), wanted, sum(planned[name] for name in wanted), free)
