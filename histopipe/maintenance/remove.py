"""Remove slides from a store."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import UsageError
from histopipe.maintenance.findings import some
from histopipe.maintenance.verify import check_untrusted
from histopipe.store.claims import Claims
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result


@dataclass(frozen=True, slots=True, repr=False)
class RemoveResult(Result):
    """What was removed.

    Attributes:
        store: path of the store.
        slides: ids of the removed slides.
        patches: of these slides.
        reusable_bytes: that are free inside the file now, also by earlier removals.
    """

    store: str
    slides: list[str]
    patches: int
    reusable_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.store}: {len(self.slides)} slides of {self.patches:,} patches removed; "
            f"{self.reusable_bytes / 1e6:,.1f} MB of the file are free (`histopipe compact` returns them to the disk)"
        )


def remove(
    store: str | Path,
    slides: Sequence[str],
    *,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> RemoveResult:
    """Remove slides from a store, each with everything that is stored of it by one transaction.

    Args:
        store: the store's folder.
        slides: ids. If one is unknown, nothing is removed.
        untrusted: verify the store before LMDB opens it.
        progress: where to show progress.

    Raises:
        NothingToDo, DamagedStore: there is no store, or it cannot be written.
        UsageError: a slide is not in the store, or an ingest is at it.
    """
    store, progress = Path(store), progress or default_progress()
    if untrusted:
        check_untrusted(store, progress=progress)
    with Store(store) as opened:
        numbers = {record.id: number for number, record in opened.records.items()}
        planned = {record.id: record.planned for record in opened.slides}
    wanted = list(dict.fromkeys(slides))
    unknown = [name for name in wanted if name not in numbers]
    if unknown:
        raise UsageError(
            f"{store} has no such slide", found=some(unknown),
            expected=some(difflib.get_close_matches(unknown[0], numbers) or numbers) or "any slide",
        )  # fmt: skip
    with (
        StoreWriter(store) as writer,
        Claims(store) as claims,
        progress.bar("remove", unit="slides", total=len(wanted)) as bar,
    ):
        for name in wanted:
            if not claims.take(numbers[name]):
                raise UsageError(
                    f"an ingest is at slide {name} of {store}", todo="wait until it is done"
                )
            writer.remove(numbers[name])
            claims.release(numbers[name])
            bar.advance()
        free = writer.reusable_bytes()
    return RemoveResult(str(store), wanted, sum(planned[name] for name in wanted), free)
