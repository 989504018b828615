"""Reports of stores and runs: the library call behind `histopipe report`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from histopipe.errors import NothingToDo, UsageError
from histopipe.reports.run_report import run_page
from histopipe.reports.store_report import store_page
from histopipe.runs import folder as run_folder

REPORT = "report.html"


def report(
    path: str | Path,
    *,
    out: str | Path | None = None,
    stores: Sequence[str | Path] = (),
    pictures: bool = True,
    follow: bool = True,
    told: Callable[[], None] = lambda: None,
) -> Path:
    """Write a report as one HTML file, which needs no network and no other file.

    Args:
        path: a store, or the folder of a finished run.
        out: the file; `report.html` in that folder, if not given.
        stores: of a run, where they are if not where they were.
        pictures: of slides and patches.
        follow: open the stores that a run names.
        told: called after each slide of a store.

    Returns:
        The file.

    Raises:
        NothingToDo: there is neither.
        UsageError: the run is not finished, or the file cannot be written.
        DamagedStore: it cannot be read.

    Example:
        >>> report("runs/first")  # doctest: +SKIP
        PosixPath('runs/first/report.html')
    """
    place = Path(path)
    if (place / run_folder.CONFIG).exists():
        page = run_page(place, stores=[Path(it) for it in stores], pictures=pictures, follow=follow)
    elif (place / "data.mdb").exists():
        if stores:
            raise UsageError("--store", found=f"{place}, which is one", expected="a run with it")
        page = store_page(place, pictures=pictures, told=told)
    else:
        raise NothingToDo(
            f"{place} is neither a store nor a run",
            expected="a folder with data.mdb or config.toml",
        )
    file = Path(out) if out is not None else place / REPORT
    if file.is_dir():
        raise UsageError(
            "--out", found=f"{file}, a folder", expected=f"a file, such as {file / REPORT}"
        )
    with run_folder.roomy(file.parent), run_folder.writable(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        page.write(file)
    return file
