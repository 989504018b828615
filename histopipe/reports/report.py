"""Write a report of a store, a run, a cross-validation, predictions or a comparison as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from histopipe.errors import NothingToDo, UsageError
from histopipe.inference.external_evaluation import read_evaluation
from histopipe.reports.checklist import MODEL_CARD, fill, write_checklist, write_model_card
from histopipe.reports.cross_validation_report import (
    SUMMARY,
    comparison_page,
    cross_validation_page,
)
from histopipe.reports.data_description import read_run
from histopipe.reports.flow_chart import write_flow
from histopipe.reports.html_page import Page
from histopipe.reports.predictions_report import predictions_page
from histopipe.reports.run_description import facts_of
from histopipe.reports.run_report import run_page
from histopipe.reports.store_report import store_page
from histopipe.runs.result import read_result
from histopipe.splits.slide_table import Flow, flow_from_json
from histopipe.system.files import read_json, reading, roomy, writable
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.output import Progress, Result, default_progress

REPORT = "report.html"
_FIGURE = ".svg"


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


def report(
    path: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    stores: Sequence[str | Path] = (),
    pictures: bool = True,
    checklist: str | None = None,
    untrusted: bool = False,
    progress: Progress | None = None,
) -> ReportResult:
    """Write a report as one HTML file without external resources; of a run also a model card, or a filled checklist.

    A model card that exists is kept, because its author may have completed it.

    Args:
        path: a store, or the folder of a finished run, a cross-validation, or predictions; or several runs, which are
            compared with the first one.
        out: the HTML file; `report.html` in that folder if None. A comparison has no default. A file ending in .svg gets
            the figure of the participant flow only.
        stores: stores of a run, if they have been moved.
        pictures: include pictures of slides and patches.
        checklist: write this checklist of a run instead: "tripod-ai" or "claim". `out` may end in .html, .md or .docx.
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
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(folder) for folder in path]
    if not paths:
        raise UsageError("no folder given", expected="a store, or folders of runs or predictions")
    folder = paths[0]
    if checklist is not None:
        return _checklist(paths, checklist, None if out is None else Path(out))
    if len(paths) > 1 and out is None:
        raise UsageError("--out is missing", expected="an HTML file for the comparison")
    file = Path(out) if out is not None else folder / REPORT
    if file.is_dir():
        raise UsageError(
            "--out", found=f"{file}, a folder", expected=f"a file, such as {file / REPORT}"
        )
    if file.suffix.lower() == _FIGURE and len(paths) == 1:
        return _flow_figure(folder, file)
    if file.suffix.lower() not in (".html", ".htm"):
        raise UsageError("--out", found=str(file), expected="a file ending in .html")
    options = _Options([Path(store) for store in stores], pictures, untrusted, progress)
    page = comparison_page(paths) if len(paths) > 1 else _page(folder, options)
    with roomy(file.parent), writable(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        page.write(file)
    card = folder / MODEL_CARD if _is_run(folder) and len(paths) == 1 else None
    kept = card is not None and card.exists()
    if card is not None and not kept:
        _write_card(folder, card)
    return ReportResult(file, file.stat().st_size, card, kept)


class _Options(NamedTuple):
    """Options of `report` that concern the contents of the page."""

    stores: Sequence[Path]
    pictures: bool
    untrusted: bool
    progress: Progress | None


def _is_run(folder: Path) -> bool:
    return folder_kind(folder) is FolderKind.RUN


def _page(folder: Path, options: _Options) -> Page:
    stores, pictures, untrusted, progress = options
    kind = folder_kind(folder)
    if kind is FolderKind.PREDICTIONS:
        return predictions_page(folder, stores=stores, pictures=pictures)
    if kind is FolderKind.CROSS_VALIDATION:
        return cross_validation_page(folder, stores=stores, pictures=pictures, follow=not untrusted)
    if kind is FolderKind.RUN:
        return run_page(folder, stores=stores, pictures=pictures, follow=not untrusted)
    if kind is FolderKind.STORE:
        if stores:
            raise UsageError(
                "--store", found=f"a report of the store {folder}", expected="a report of a run"
            )
        return store_page(folder, pictures=pictures, progress=progress or default_progress())
    raise NothingToDo(
        f"{folder} is neither a store, a run nor predictions",
        expected="a folder with data.mdb, config.toml or predict.json",
    )


def _checklist(paths: Sequence[Path], name: str, out: Path | None) -> ReportResult:
    """Write a filled checklist of a run."""
    if len(paths) > 1 or not _is_run(paths[0]):
        raise UsageError(
            "--checklist",
            found=", ".join(map(str, paths)),
            expected="the folder of one finished run",
        )
    with ExitStack() as stack:
        filled = fill(name, facts_of(read_run(paths[0], (), stack, follow=False)))
    file = paths[0] / f"{name}.html" if out is None else out
    with roomy(file.parent), writable(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_checklist(filled, file, title=paths[0].resolve().name)
    return ReportResult(file, file.stat().st_size)


def _flow_in(folder: Path) -> Flow:
    """Return the participant flow of a run, a cross-validation or predictions; empty if there is none."""
    if folder_kind(folder) is FolderKind.PREDICTIONS:
        external = read_evaluation(folder)
        return {} if external is None else external.flow
    if _is_run(folder):
        return read_result(folder).flow
    path = folder / SUMMARY
    with suppress(FileNotFoundError), reading(path):
        return flow_from_json(read_json(path).get("flow", {}))
    return {}


def _flow_figure(folder: Path, file: Path) -> ReportResult:
    """Write the participant flow as an SVG file."""
    flow = _flow_in(folder)
    if not flow:
        raise UsageError(
            f"{folder} has no participant flow", expected="a finished run, or predictions of slides with labels"
        )  # fmt: skip
    with roomy(file.parent), writable(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        read = "Predicted" if folder_kind(folder) is FolderKind.PREDICTIONS else "Ingested"
        write_flow(flow, file, read=read)
    return ReportResult(file, file.stat().st_size)


def _write_card(folder: Path, card: Path) -> None:
    """Write the model card of a run."""
    with ExitStack() as stack:
        facts = facts_of(read_run(folder, (), stack, follow=False))
    with roomy(folder), writable(folder):
        write_model_card(card, facts, name=folder.resolve().name)
