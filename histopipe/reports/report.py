"""Write a report of a store, a run, a cross-validation, predictions or a comparison as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from histopipe.errors import NothingToDo, UsageError
from histopipe.inference.predictions_folder import SETTINGS
from histopipe.reports.comparison_report import comparison_page
from histopipe.reports.cross_validation_report import cross_validation_page
from histopipe.reports.predictions_report import predictions_page
from histopipe.reports.run_report import run_page
from histopipe.reports.store_report import store_page
from histopipe.runs import folder as run_folder
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result

REPORT = "report.html"


@dataclass(frozen=True, repr=False)
class ReportResult(Result):
    """Result of `report`.

    Attributes:
        file: the HTML file.
        size_bytes: size of the file.
    """

    file: Path
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.file}  ({self.size_bytes / 1e6:,.1f} MB)"


def report(
    path: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    stores: Sequence[str | Path] = (),
    pictures: bool = True,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> ReportResult:
    """Write a report as one HTML file without external resources.

    Args:
        path: a store, or the folder of a finished run, a cross-validation, or predictions; or several runs, which are
            compared with the first one.
        out: the HTML file; `report.html` in that folder if None. A comparison has no default.
        stores: stores of a run, if they have been moved.
        pictures: include pictures of slides and patches.
        untrusted: do not open stores at the paths in the run's config.toml.
        progress: shows the progress; `default_progress()` if None.

    Returns:
        The file and its size.

    Raises:
        NothingToDo: the path is none of these.
        UsageError: the run is not finished, or the file cannot be written.
        DamagedStore: the store or run cannot be read.
        MachineShort: the disk is full.

    Example:
        >>> report("runs/first")  # doctest: +SKIP
        runs/first/report.html  (1.2 MB)
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(it) for it in path]
    folder = paths[0]
    given = [Path(it) for it in stores]
    if len(paths) > 1:
        if out is None:
            raise UsageError("--out is missing", expected="an HTML file for the comparison")
        page = comparison_page(paths)
    elif (folder / SETTINGS).is_file():
        page = predictions_page(folder, stores=given, pictures=pictures)
    elif run_folder.is_cross_validation(folder):
        page = cross_validation_page(folder)
    elif (folder / run_folder.CONFIG).exists():
        page = run_page(folder, stores=given, pictures=pictures, follow=not untrusted)
    elif (folder / "data.mdb").exists():
        if stores:
            raise UsageError(
                "--store", found=f"a report of the store {folder}", expected="a report of a run"
            )
        page = store_page(folder, pictures=pictures, progress=progress or default_progress())
    else:
        raise NothingToDo(
            f"{folder} is neither a store, a run nor predictions",
            expected="a folder with data.mdb, config.toml or predict.json",
        )
    file = Path(out) if out is not None else folder / REPORT
    if file.is_dir():
        raise UsageError(
            "--out", found=f"{file}, a folder", expected=f"a file, such as {file / REPORT}"
        )
    with run_folder.roomy(file.parent), run_folder.writable(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        page.write(file)
    return ReportResult(file, file.stat().st_size)
