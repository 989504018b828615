"""Cores of tissue microarrays as entries of a store: each is a region of its file, with an id, a label and a patient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from histopipe.annotations.annotation_files import GEOJSON, find_annotations
from histopipe.errors import MaskUnfit
from histopipe.slides.slide_files import SlideFile, SlideNames
from histopipe.store.record import SlideRecord
from histopipe.system.output import Progress, counted, some
from histopipe.tiling.core_files import core_region, read_cores
from histopipe.tiling.core_grid import Core

_LISTED = 50
"""Most names in a message about cores that are left out."""


def with_cores(
    files: Sequence[SlideFile], folder: Path, progress: Progress
) -> tuple[list[SlideFile], dict[str, Core]]:
    """Return the cores of slides as files with the ids SLIDE/CORE; and by id all cores, also those that are missing.

    A slide without a usable grid, and a core whose name is uncertain, has a `problem`, so that it fails.

    Raises:
        UsageError: there is no grid, or no grid has the name of a slide.
    """
    grids, notes = find_annotations(folder, SlideNames(file.id for file in files), GEOJSON)
    for note in notes:
        progress.message(note)
    entries, outlines = list[SlideFile](), dict[str, Core]()
    for file in files:
        try:
            if file.id not in grids:
                raise MaskUnfit(  # noqa: TRY301
                    f"{folder} has no cores of it",
                    todo="run `histopipe tissue --cores` on the slide",
                )
            every = read_cores(grids[file.id])
            cores = [core for core in every if core.state != "missing"]
            states = Counter(core.state for core in cores)
            if not states["core"]:
                raise MaskUnfit(  # noqa: TRY301
                    f"{grids[file.id]} has no core with a certain name",
                    found=f"{counted(states['uncertain'], 'uncertain core')}, the first: {cores[0].why}"
                    if cores
                    else "no core",
                    todo="correct and confirm the names on the page, and save the file",
                )
        except MaskUnfit as error:
            entries.append(replace(file, problem=str(error)))
            continue
        nameless = [core for core in cores if not core.name]
        if nameless:
            progress.message(
                f"{file.id}: {counted(len(nameless), 'piece')} of tissue without a name left out"
            )
        outlines |= {f"{file.id}/{core.name}": core for core in every if core.name}
        for core in cores:
            name, problem = f"{file.id}/{core.name}", file.problem
            if core.state == "uncertain":
                problem = f"its name is uncertain ({core.why}): confirm it in {grids[file.id]}"
            if core.name:
                entries.append(replace(file, id=name, core=core_region(core), problem=problem))
    return entries, outlines


def without_rows(
    entries: Iterable[SlideFile], rows: Collection[str], progress: Progress
) -> list[SlideFile]:
    """Return the files without cores that have no row in a table of labels, and show these."""
    kept = [entry for entry in entries if entry.core is None or entry.id in rows]
    left = sorted({entry.id for entry in entries} - {entry.id for entry in kept})
    if left:
        progress.message(
            f"{counted(len(left), 'core')} without a row in the labels file left out: {some(left, _LISTED)}"
        )
    return kept


def core_parents(entries: Iterable[SlideFile | SlideRecord]) -> Mapping[str, str]:
    """Return the id of the file of each core, by the id of the core."""
    return {e.id: e.id.rpartition("/")[0] for e in entries if e.core is not None}


def show_left_cores(
    entries: Iterable[SlideFile], records: Iterable[SlideRecord], progress: Progress
) -> None:
    """Show the cores of a store that are not in the grids of their slides any more: their names were corrected."""
    current, recorded = core_parents(entries), core_parents(records)
    left = sorted(n for n in recorded.keys() - current.keys() if recorded[n] in current.values())
    if left:
        progress.message(
            f"{counted(len(left), 'core')} of the store not in the grids any more, perhaps with wrong names: "
            f"{some(left, _LISTED)}; `histopipe remove` removes them"
        )
