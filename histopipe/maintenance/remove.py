"""Remove slides from a store."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.maintenance.verify import check_untrusted
from histopipe.store.claims import Claims
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result, counted, some


@dataclass(frozen=True, slots=True, repr=False)
class RemoveResult(Result):
    """Result of `remove`.

    Attributes:
        store: path of the store.
        slides: ids of the removed slides.
        patches: number of patches of these slides.
        reusable_bytes: free bytes inside the file, also from earlier removals.
    """

    store: str
    slides: list[str]
    patches: int
    reusable_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.store}: {counted(len(self.slides), 'slide')} with {counted(self.patches, 'patch')} removed; "
            f"{self.reusable_bytes / 1e6:,.1f} MB of the file are free (`histopipe compact` returns them to the disk)"
        )


def remove(
    store: str | Path,
    slides: Sequence[str],
    *,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> RemoveResult:
    """Remove slides from a store, each with all its entries in one transaction.

    Args:
        store: the store's folder.
        slides: ids of the slides. If one is unknown, nothing is removed.
        untrusted: verify the store before LMDB opens it.
        progress: where to show progress.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be written.
        UsageError: a slide is not in the store, or is being ingested.
    """
    store, progress = Path(store), progress or default_progress()
    if untrusted:
        check_untrusted(store, progress=progress)
    with Store(store) as opened:
        numbers = {record.id: number for number, record in opened.records.items()}
        planned = {record.id: record.planned for record in opened.slides}
    names = list(dict.fromkeys(slides))
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise UsageError(
            f"{store} has no such slide", found=some(unknown),
            expected=some(difflib.get_close_matches(unknown[0], numbers) or numbers) or "a store with slides",
        )  # fmt: skip
    with (
        StoreWriter(store) as writer,
        Claims(store) as claims,
        progress.bar("remove", unit="slides", total=len(names)) as bar,
    ):
        for name in names:
            if not claims.take(numbers[name]):
                raise UsageError(
                    f"slide {name} of {store} is being ingested",
                    todo="wait until the ingest has finished",
                )
            writer.remove(numbers[name])
            claims.release(numbers[name])
            bar.advance()
        free = writer.reusable_bytes()
    return RemoveResult(str(store), names, sum(planned[name] for name in names), free)
