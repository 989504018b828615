"""Write a report of a store, a run, a cross-validation, predictions or a comparison as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from histopipe.errors import NothingToDo, UsageError
from histopipe.predicting.external_evaluation import read_evaluation
from histopipe.reports.charts import write_flow
from histopipe.reports.checklist import (
    MODEL_CARD,
    fill_checklist,
    make_statements,
    write_checklist,
    write_model_card,
)
from histopipe.reports.options import ReportOptions
from histopipe.reports.result_pages import predictions_page, run_page
from histopipe.reports.run_description import describe_run
from histopipe.reports.store_report import store_page
from histopipe.reports.study_pages import (
    SUMMARY,
    comparison_page,
    cross_validation_page,
    probe_page,
)
from histopipe.runs.run import Run
from histopipe.splits.slide_table import Flow, flow_from_json
from histopipe.system.files import read_json, reading, roomy, writable
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.output import Progress, Result, default_progress
from histopipe.system.settings import declared_settings, make_settings, takes

REPORT = "report.html"


@dataclass(frozen=True, repr=False)
class ReportResult(Result):
    """Result of `report`.

    Attributes:
        file: the HTML file.
        size_bytes: size of the file.
        model_card: Markdown file with the model card, in the folder of the run; None unless the report is of a run.
        card_kept: whether the card existed before.
    """

    file: Path
    size_bytes: int
    model_card: Path | None = None
    card_kept: bool = False

    def __str__(self) -> str:
        kept = "  (not changed)" if self.card_kept else ""
        card = "" if self.model_card is None else f"\n{self.model_card}{kept}"
        return f"{self.file}  ({self.size_bytes / 1e6:,.1f} MB){card}"


@takes(declared_settings(ReportOptions))
def report(
    path: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    pictures: bool = True,
    untrusted: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> ReportResult:
    """Write a report as one HTML file without external resources; of a run also a model card, or a filled checklist.

    A model card that exists is kept, because its author may have completed it.

    Args:
        path: a store, or the folder of a finished run, a cross-validation, or predictions; or several runs, which are
            compared with the first one.
        out: the HTML file; `report.html` in that folder if None. A comparison has no default. A file ending in .svg gets
            the figure of the participant flow only.
        pictures: include pictures of slides and patches.
        untrusted: do not open stores at the paths in the run's config.toml.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md.

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
    options = make_settings(ReportOptions, settings)
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(folder) for folder in path]
    if not paths:
        raise UsageError("no folder given", expected="a store, or folders of runs or predictions")
    if options.checklist is not None:
        return _report_checklist(paths, options.checklist, out)
    folder = paths[0]
    if len(paths) > 1 and out is None:
        raise UsageError("--out is missing", expected="an HTML file for the comparison")
    file = Path(out) if out is not None else folder / REPORT
    if file.is_dir():
        raise UsageError(
            "--out", found=f"{file}, a folder", expected=f"a file, such as {file / REPORT}"
        )
    if file.suffix.lower() == ".svg" and len(paths) == 1:
        return _report_flow(folder, file)
    if file.suffix.lower() not in (".html", ".htm"):
        raise UsageError("--out", found=str(file), expected="a file ending in .html")
    if len(paths) > 1:
        return _write(file, comparison_page(paths).write)
    return _report_folder(
        folder,
        file,
        [Path(store) for store in options.stores],
        progress or default_progress(),
        pictures=pictures,
        follow=not untrusted,
    )


def _report_folder(
    folder: Path,
    file: Path,
    stores: Sequence[Path],
    progress: Progress,
    *,
    pictures: bool,
    follow: bool,
) -> ReportResult:
    kind = folder_kind(folder)
    if kind is FolderKind.RUN:
        return _report_run(folder, file, stores, pictures=pictures, follow=follow)
    if kind is FolderKind.CROSS_VALIDATION:
        page = cross_validation_page(folder, stores=stores, pictures=pictures, follow=follow)
    elif kind is FolderKind.PROBES:
        page = probe_page(folder)
    elif kind is FolderKind.PREDICTIONS:
        page = predictions_page(folder, stores=stores, pictures=pictures)
    elif kind not in (FolderKind.STORE, FolderKind.PARTS):
        raise NothingToDo(
            f"{folder} is neither a store, a run nor predictions",
            expected="a folder with data.mdb, config.toml or predict.json",
        )
    elif stores:
        raise UsageError(
            "--store", found=f"a report of the store {folder}", expected="a report of a run"
        )
    else:
        page = store_page(folder, pictures=pictures, progress=progress)
    return _write(file, page.write)


def _write(file: Path, write: Callable[[Path], None]) -> ReportResult:
    """Write a file in a folder that may not exist yet."""
    with roomy(file.parent), writable(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file)
    return ReportResult(file, file.stat().st_size)


def _report_checklist(
    paths: Sequence[Path], checklist: str, out: str | Path | None
) -> ReportResult:
    folder = paths[0]
    if len(paths) > 1 or folder_kind(folder) is not FolderKind.RUN:
        raise UsageError(
            "--checklist",
            found=", ".join(map(str, paths)),
            expected="the folder of one finished run",
        )
    filled = fill_checklist(
        checklist, make_statements(describe_run(Run(folder))), folder.resolve().name
    )
    file = folder / f"{checklist}.html" if out is None else Path(out)
    return _write(file, partial(write_checklist, filled))


def _report_run(
    folder: Path, file: Path, stores: Sequence[Path], *, pictures: bool, follow: bool
) -> ReportResult:
    """Write the page of a run, and its model card unless there is one."""
    run = Run(folder)
    description = describe_run(run)
    page = run_page(run, description, stores=stores, pictures=pictures, follow=follow)
    result, card = _write(file, page.write), folder / MODEL_CARD
    if card.exists():
        return replace(result, model_card=card, card_kept=True)
    _write(card, partial(write_model_card, make_statements(description), run=folder.resolve().name))
    return replace(result, model_card=card)


def _report_flow(folder: Path, file: Path) -> ReportResult:
    """Write the figure of the participant flow of a run, a cross-validation or predictions."""
    kind, read = folder_kind(folder), "Ingested"
    flow: Flow = {}
    if kind is FolderKind.PREDICTIONS:
        external, read = read_evaluation(folder), "Predicted"
        flow = {} if external is None else external.flow
    elif kind is FolderKind.RUN:
        flow = Run(folder).result.flow
    else:
        with suppress(FileNotFoundError), reading(folder / SUMMARY):
            flow = flow_from_json(read_json(folder / SUMMARY).get("flow", {}))
    if not flow:
        raise UsageError(
            f"{folder} has no participant flow",
            expected="a finished run, or predictions of slides with labels",
        )
    return _write(file, partial(write_flow, flow, read=read))
