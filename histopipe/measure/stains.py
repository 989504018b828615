"""Fit the stain of each slide of a store, and add the fits to the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from histopipe.dataset.stain_fit import TooLittleTissue, fit_slide
from histopipe.errors import DamagedStore
from histopipe.measure.columns import MeasureResult
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress, counted, default_progress


@dataclass(frozen=True, slots=True, repr=False)
class StainsResult(MeasureResult):
    """Result of `stains`: `done` has the ids of slides fitted now, `same` those that already had a fit."""

    done: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Number of slides."""
        return f"{counted(len(self.done), 'slide')} measured, {len(self.failed)} failed"


def stains(
    store: str | Path = "patches.lmdb", *, force: bool = False, progress: Progress | None = None
) -> StainsResult:
    """Fit the stain of every complete slide on 64 of its patches, and add the fits to the store.

    There are two fits: mean and deviation in lαβ (Reinhard et al. 2001), and stain vectors (Macenko et al. 2009). The
    patches are not changed. `train(stain_norm=...)` and `load_dataset(stain_norm=...)` use the fits.

    Args:
        store: the store's folder.
        force: also fit slides that already have a fit.
        progress: where progress is shown; None chooses bars or lines.

    Raises:
        NothingToDo, DamagedStore, MachineShort: the store cannot be used.

    Example:
        >>> stains("patches.lmdb").failed  # doctest: +SKIP
        {}
    """
    path, display, result = Path(store), progress or default_progress(), StainsResult()
    Store(path).close()  # fails if the store cannot be read, before anything is written
    with StoreWriter(path) as writer, Store(path) as opened:
        fitted = set() if force else set(opened.stains())
        with_patches = {n: record.id for n, record in opened.complete.items() if record.stored}
        result.same.extend(name for n, name in with_patches.items() if n in fitted)
        todo = {n: name for n, name in with_patches.items() if n not in fitted}
        with display.bar("stains", unit="slides", total=len(todo)) as bar:
            for number, name in todo.items():
                try:
                    writer.put_stain(number, fit_slide(opened, number))
                    result.done.append(name)
                except (TooLittleTissue, DamagedStore) as error:
                    result.failed[name] = str(error)
                    display.message(f"stain not measured: {error}")
                bar.advance()
    return result
