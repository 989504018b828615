"""Cores of tissue microarrays as entries of a store: each is a region of its file, with an id, a label and a patient."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from histopipe.annotations.annotation_files import GEOJSON, find_annotations
from histopipe.errors import MaskUnfit, UsageError
from histopipe.slides.slide_files import SlideFile, SlideNames
from histopipe.store.record import SlideRecord, SlideState
from histopipe.system.output import Progress, counted, some
from histopipe.tiling.core_files import core_region, read_cores
from histopipe.tiling.core_grid import Core

_LISTED = 50
"""Most names in a message about cores that are left out."""


def with_cores(
    files: Sequence[SlideFile],
    folder: Path | None,
    records: Sequence[SlideRecord],
    progress: Progress,
) -> tuple[list[SlideFile], dict[str, Core]]:
    """Return the cores of slides as files with the ids SLIDE/CORE, and the cores by id; without a folder, the slides.

    A slide without a usable grid, and a core whose name is uncertain, has a `problem`, so that it fails. Cores of a store
    with these `records` that are not in the grids any more are shown.

    Raises:
        UsageError: there is no grid, no grid has the name of a slide, or the store has a slide both as a whole and in cores.
    """
    recorded, by_id = core_parents(records), {file.id: file for file in files}
    whole = {r.id for r in records if r.core is None and r.state is SlideState.COMPLETE}
    if mixed := sorted(by_id.keys() & (whole if folder else {*recorded.values()})):
        raise UsageError(
            f"{some(mixed, 3)}: in the store {'as a whole' if folder else 'in cores'}",
            todo="choose another --out, remove it, or pass --cores for cores only",
        )
    if folder is None:
        return [*files], {}
    grids, _ = find_annotations(folder, SlideNames(by_id), GEOJSON)
    entries, cores = list[SlideFile](), dict[str, Core]()
    for file in files:
        try:
            grid = read_cores(grids[file.id]) if file.id in grids else []
            used = [core for core in grid if core.state != "missing"]
            if not any(core.state == "core" for core in used):
                raise MaskUnfit(  # noqa: TRY301
                    f"{folder} has no core with a certain name",
                    found=f"{len(used)} uncertain ones",
                    todo=f"confirm the names of `histopipe tissue --cores`, and save {file.id}{GEOJSON[0]}",
                )
        except MaskUnfit as error:
            entries.append(replace(file, problem=str(error)))
            continue
        nameless = sum(not core.name for core in used)
        if nameless:
            progress.message(
                f"{file.id}: {counted(nameless, 'piece')} of tissue without a name left out"
            )
        cores |= {f"{file.id}/{core.name}": core for core in used if core.name}
    for name, core in cores.items():
        file = by_id[name.rpartition("/")[0]]
        uncertain = f"its name is uncertain{f' ({core.why})' * bool(core.why)}: confirm it"
        problem = file.problem if core.state == "core" else uncertain
        entries.append(replace(file, id=name, core=core_region(core), problem=problem))
    left = sorted(n for n in recorded.keys() - cores.keys() if recorded[n] in by_id)
    if left:
        progress.message(
            f"{counted(len(left), 'core')} of the store not in the grids any more, perhaps with wrong names: "
            f"{some(left, _LISTED)}; `histopipe remove` removes them"
        )
    return entries, cores


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
