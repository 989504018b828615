"""What is recorded of slides, wherever a path leads: in a store, in a folder of parts, or nothing yet."""

from __future__ import annotations

from pathlib import Path

from histopipe.errors import NothingToDo
from histopipe.store.catalog import read_catalog
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store


def recorded(store: Path) -> dict[int, SlideRecord]:
    """The records of a store by number, or of a folder of parts by any; none where there is no store yet."""
    found: list[SlideRecord] = []
    catalog = read_catalog(store)
    for part in [] if catalog is None else catalog.parts:
        with Store(part) as opened:
            found += opened.slides
    if catalog is not None:
        return dict(enumerate(found))
    try:
        with Store(store) as opened:
            return opened.records
    except NothingToDo:
        return {}
