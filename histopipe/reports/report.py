"""Write reports: HTML pages of a store, a run, a cross-validation, predictions or a comparison; checklists and model cards.

Reporting checklists (TRIPOD+AI, CLAIM, STARD-AI and REFINE) and the model card are filled with what a run knows.
The sentences about a run are in `templates/statements.j2`, by name. `templates/methods.j2` and `model-card.md.j2`
consist of them, and the items of `checklists/*.toml` name those that answer an item (`run`) or a part of it (`part`).

Items are in our own words, under the numbers of the published checklists, which are cited.

Source:
    G. S. Collins et al., TRIPOD+AI statement, BMJ 385 (2024) e078378; A. S. Tejani et al., CLAIM: 2024 update,
    Radiology: Artificial Intelligence 6 (2024) e240300; V. Sounderajah et al., STARD-AI, Nature Medicine 31 (2025) 3283.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from histopipe._version import __version__
from histopipe.errors import NothingToDo, UsageError
from histopipe.evaluation.evaluate import number, with_ends, with_interval
from histopipe.predicting.external_evaluation import read_evaluation
from histopipe.reports.charts import write_flow
from histopipe.reports.evaluation_blocks import column_title
from histopipe.reports.html_page import TEMPLATES, Block, Cell, Page, Table
from histopipe.reports.options import Checklist, ReportOptions
from histopipe.reports.result_pages import predictions_page, run_page
from histopipe.reports.run_description import describe_run, list_counts, percent
from histopipe.reports.store_report import store_page
from histopipe.reports.study_pages import (
    SUMMARY,
    comparison_page,
    cross_validation_page,
    probe_page,
)
from histopipe.runs.run import Run
from histopipe.splits.slide_table import Flow, flow_from_json
from histopipe.system.files import read_json, reading, roomy, writable, write_atomically
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.output import Progress, Result, counted, default_progress, listed, plural
from histopipe.system.settings import declared_settings, make_settings, takes

MODEL_CARD = "model-card.md"
EMPTY = "________"
"""Field for the authors."""

REFERENCES = {
    "collins2024tripod": """@article{collins2024tripod,
  author = {Collins, Gary S. and Moons, Karel G. M. and Dhiman, Paula and others},
  title = {{TRIPOD+AI} statement: updated guidance for reporting clinical prediction models that use regression or machine learning methods},
  journal = {BMJ}, volume = {385}, pages = {e078378}, year = {2024}, doi = {10.1136/bmj-2023-078378}
}""",
    "tejani2024claim": """@article{tejani2024claim,
  author = {Tejani, Ali S. and Klontzas, Michail E. and Gatti, Anthony A. and others},
  title = {Checklist for Artificial Intelligence in Medical Imaging ({CLAIM}): 2024 Update},
  journal = {Radiology: Artificial Intelligence}, volume = {6}, number = {4}, pages = {e240300}, year = {2024},
  doi = {10.1148/ryai.240300}
}""",
    "sounderajah2025stard": """@article{sounderajah2025stard,
  author = {Sounderajah, Viknesh and Guni, Ahmad and Liu, Xiaoxuan and others},
  title = {The {STARD-AI} reporting guideline for diagnostic accuracy studies using artificial intelligence},
  journal = {Nature Medicine}, volume = {31}, number = {10}, pages = {3283--3289}, year = {2025},
  doi = {10.1038/s41591-025-03953-8}
}""",
    "mese2026refine": """@article{mese2026refine,
  author = {Mese, Ismail and Akinci D'Antonoli, Tugba and Bluethgen, Christian and others},
  title = {Reporting checklist for foundation and large language models in medical research ({REFINE}): an international consensus guideline},
  journal = {Diagnostic and Interventional Radiology}, year = {2026}, doi = {10.4274/dir.2026.263812}
}""",
    "newcombe2006auc": """@article{newcombe2006auc,
  author = {Newcombe, Robert G.},
  title = {Confidence intervals for an effect size measure based on the {Mann-Whitney} statistic. Part 2: asymptotic methods and evaluation},
  journal = {Statistics in Medicine}, volume = {25}, number = {4}, pages = {559--573}, year = {2006}, doi = {10.1002/sim.2324}
}""",
    "vancalster2019calibration": """@article{vancalster2019calibration,
  author = {Van Calster, Ben and McLernon, David J. and van Smeden, Maarten and Wynants, Laure and Steyerberg, Ewout W.},
  title = {Calibration: the {Achilles} heel of predictive analytics},
  journal = {BMC Medicine}, volume = {17}, pages = {230}, year = {2019}, doi = {10.1186/s12916-019-1466-7}
}""",
    "vickers2006decision": """@article{vickers2006decision,
  author = {Vickers, Andrew J. and Elkin, Elena B.},
  title = {Decision curve analysis: a novel method for evaluating prediction models},
  journal = {Medical Decision Making}, volume = {26}, number = {6}, pages = {565--574}, year = {2006},
  doi = {10.1177/0272989X06295361}
}""",
    "guo2017calibration": """@inproceedings{guo2017calibration,
  author = {Guo, Chuan and Pleiss, Geoff and Sun, Yu and Weinberger, Kilian Q.},
  title = {On calibration of modern neural networks},
  booktitle = {International Conference on Machine Learning}, pages = {1321--1330}, year = {2017}
}""",
    "histopipe": f"""@software{{histopipe,
  author = {{{{The histopipe maintainers}}}},
  title = {{histopipe: from whole-slide images to a trained model}}, version = {{{__version__}}}
}}""",
}
"""BibTeX entries by key."""
_CITED = {
    "newcombe2006auc": "Newcombe 2006",
    "vancalster2019calibration": "Van Calster et al. 2019",
    "vickers2006decision": "Vickers and Elkin 2006",
    "guo2017calibration": "Guo et al. 2017",
}
"""How the methods name papers, by key."""

Statements = Mapping[str, tuple[str, str]]
"""Sentences about a run by name, "" if the run does not know them, each with the file or files that they come from."""


TEMPLATES.filters |= {
    "column_title": column_title,
    "counted": counted,
    "decimals": number,
    "difference": lambda difference: with_ends(difference.value, difference.interval, signed=True),
    "metric": lambda metrics, name: (
        "undefined" if metrics.values.get(name) is None else with_interval(metrics, name)
    ),
    "listed": listed,
    "listing": list_counts,
    "number": "{:g}".format,
    "percent": percent,
    "plural": plural,
    "thousands": "{:,.0f}".format,
}


def make_statements(description: Mapping[str, Any]) -> Statements:
    """Return the statements about a run, from its description."""
    statements = {}

    def add_statement(name: str, files: str, caller: Callable[[], str]) -> str:
        statements[name] = _joined_lines(caller()), files
        return ""

    TEMPLATES.get_template("statements.j2").render(description, statement=add_statement)
    return statements


def _joined_lines(text: str) -> str:
    """Return the lines of a text, and what is between blank lines, as one line."""
    return re.sub(r"\s*\n\s*", " ", text).strip()


def find_answers(statements: Statements, *names: str) -> list[str]:
    """Return those of the named statements that the run knows, each with its files in brackets."""
    return [f"{text} [{files}]" for text, files in (statements[name] for name in names) if text]


def fill_checklist(name: Checklist, statements: Statements, run: str) -> dict[str, Any]:
    """Fill a checklist with the statements about a run, which has the name `run`.

    An item is filled if the run knows all that it asks for; partly, if it knows some; else it is for the authors.

    Returns:
        The contents of the file of the checklist, with `heading` (its name and the run), `summary` (number of items by
        status), `methods` (a paragraph for the section on methods), and `references` (entries in BibTeX). Each `item` also
        has its status and `answers`: statements that answer it or a part of it, and an empty field for what is unknown.
    """
    folder = resources.files("histopipe.reports") / "checklists"
    checklist = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
    for item in checklist["item"]:
        required = item.get("run", [])
        answers = find_answers(statements, *required, *item.get("part", []))
        status = "partly" if answers else "for the authors"
        if required and all(statements[key][0] for key in required):
            status = "filled from the run"
        else:
            answers.append(EMPTY)
        item |= {"status": status, "answers": answers}
    counts = Counter(item["status"] for item in checklist["item"])
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    methods = _joined_lines(
        TEMPLATES.get_template("methods.j2").render(
            {key: text for key, (text, _) in statements.items()}
        )
    )
    written = " ".join(
        [methods, *(answer for item in checklist["item"] for answer in item["answers"])]
    )
    cited = [key for key, source in _CITED.items() if source in written]
    return {
        **checklist,
        "heading": f"{checklist['name']}: {run}",
        "summary": f"{summary}. Check every answer before you submit it.",
        "methods": methods,
        "references": [REFERENCES[key] for key in (checklist["cite"], "histopipe", *cited)],
    }


def write_model_card(statements: Statements, path: Path, *, run: str) -> None:
    """Write the model card by one rename. Fields that a run cannot know are left empty. `run` is its name."""
    card = TEMPLATES.get_template("model-card.md.j2").render(
        name=run, answers=partial(find_answers, statements), empty=EMPTY
    )
    write_atomically(path, card + "\n")


_TONES = {"filled from the run": "good", "partly": "", "for the authors": "bad"}


def write_checklist(checklist: Mapping[str, Any], path: Path) -> None:
    """Write a checklist by one rename; the suffix of the path is .html or .md.

    Raises:
        UsageError: the path has another suffix.
    """
    write = _WRITERS.get(path.suffix.lower())
    if write is None:
        raise UsageError(
            "--out",
            found=str(path),
            expected=f"a file ending in {' or '.join(_WRITERS)}",
            todo="for Word, open the .html file there, or run `pandoc CHECKLIST.md -o CHECKLIST.docx`",
        )
    write(checklist, path)


def _write_html(checklist: Mapping[str, Any], path: Path) -> None:
    page = Page(checklist["heading"], checklist["title"])
    page.add("Summary", Block("text", checklist["summary"]))
    page.add(
        "Items",
        Table(
            "All items, in our own words",
            ("item", "section", "what to report", "status", "answer [file]"),
            [
                [
                    Cell(entry["number"]),
                    Cell(entry["section"]),
                    Cell(entry["text"], tone="why"),
                    Cell(entry["status"], tone=_TONES[entry["status"]]),
                    Cell(" ".join(entry["answers"]), tone="why"),
                ]
                for entry in checklist["item"]
            ],
        ),
    )
    page.add("Methods", Block("text", checklist["methods"]))
    page.add("References", *(Block("text", entry) for entry in checklist["references"]))
    page.write(path)


_WRITERS: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    ".html": _write_html,
    ".md": lambda checklist, path: write_atomically(
        path, TEMPLATES.get_template("checklist.md.j2").render(checklist=checklist) + "\n"
    ),
}


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
    paths: Sequence[Path], checklist: Checklist, out: str | Path | None
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
