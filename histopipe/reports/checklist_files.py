"""Write a filled checklist as HTML, Markdown or DOCX, with empty fields for the authors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from histopipe.errors import MachineShort, UsageError
from histopipe.reports.checklist import EMPTY, Checklist, ChecklistItem
from histopipe.reports.html_page import Cell, Column, Page, Row, Table, Text
from histopipe.system.files import atomic_write, write_atomically

_TONES = {"filled from the run": "good", "partly": "", "for the authors": "bad"}
_WIDTHS_CM = (1.4, 5.4, 2.2, 8.0)
_CHECK = "Check every answer before you submit it."


def write_checklist(checklist: Checklist, path: Path, *, title: str) -> None:
    """Write a checklist by one rename; the suffix of the path is .html, .md or .docx.

    Raises:
        UsageError: the path has another suffix.
        MachineShort: python-docx is not installed.
    """
    write = _WRITERS.get(path.suffix.lower())
    if write is None:
        raise UsageError(
            "--out", found=str(path), expected=f"a file ending in {' or '.join(_WRITERS)}"
        )
    write(checklist, path, title)


def _answer(item: ChecklistItem) -> list[str]:
    """Return the lines of the answer to an item, with an empty field for what the run cannot know."""
    lines = [f"{fact.text} [{fact.source}]" for fact in item.facts]
    return lines if item.status == "filled from the run" else [*lines, EMPTY]


def _write_html(checklist: Checklist, path: Path, title: str) -> None:
    page = Page(f"{checklist.name}: {title}", checklist.title)
    page.add("Summary", Text(f"{checklist.summary}. {_CHECK}"))
    rows = [
        Row([
            Cell(item.number), Cell(item.section), Cell(item.text, tone="why"), Cell(item.status, tone=_TONES[item.status]),
            Cell(" ".join(_answer(item)), tone="why"),
        ])
        for item in checklist.items
    ]  # fmt: skip
    columns = ("item", "section", "what to report", "status", "answer [file]")
    page.add(
        "Items", Table("All items, in our own words", [Column(name) for name in columns], rows)
    )
    page.add("Methods", Text(checklist.methods))
    page.add("References", *(Text(entry) for entry in checklist.references))
    page.write(path)


def _write_markdown(checklist: Checklist, path: Path, title: str) -> None:
    lines = [
        f"# {checklist.name}: {title}",
        "",
        checklist.title,
        "",
        f"{checklist.summary}. {_CHECK}",
        "",
    ]
    section = ""
    for item in checklist.items:
        if item.section != section:
            section = item.section
            lines += [f"## {section}", ""]
        lines += [f"**{item.number}** {item.text} *{item.status}*", ""]
        lines += [*(f"- {text}" for text in _answer(item)), ""]
    lines += ["## Methods", "", checklist.methods, "", "## References", ""]
    lines += ["```bibtex", "\n\n".join(checklist.references), "```", ""]
    write_atomically(path, "\n".join(lines))


def _write_docx(checklist: Checklist, path: Path, title: str) -> None:
    try:
        import docx
        from docx.oxml import OxmlElement
        from docx.shared import Cm, Pt
    except ImportError as error:
        raise MachineShort(
            f"DOCX files need {error.name}",
            todo="pip install 'histopipe[docx]', or choose .html or .md",
        ) from error
    document = docx.Document()
    document.styles["Normal"].font.size = Pt(9)
    for part_of in document.sections:
        part_of.page_width, part_of.page_height = Cm(21.0), Cm(29.7)
        part_of.left_margin = part_of.right_margin = Cm(2)
    document.add_heading(f"{checklist.name}: {title}", 1)
    document.add_paragraph(f"{checklist.title}. {checklist.summary}. {_CHECK}")
    table = document.add_table(rows=1, cols=len(_WIDTHS_CM), style="Table Grid")
    table.autofit = False
    for cell, text in zip(
        table.rows[0].cells,
        ("Item", "What to report", "Status", "Answer [file]"),
        strict=True,
    ):
        cell.paragraphs[0].add_run(text).bold = True
    section = ""
    for item in checklist.items:
        if item.section != section:
            section = item.section
            cells = table.add_row().cells
            heading = cells[0].merge(cells[-1]).paragraphs[0]
            heading.add_run(section).bold = True
            heading.paragraph_format.keep_with_next = True
        cells = table.add_row().cells
        for cell, text in zip(
            cells, (item.number, item.text, item.status, "\n".join(_answer(item))), strict=True
        ):
            cell.text = text
    # LibreOffice reads the widths of the columns, Word those of the cells.
    for column, width in zip(table.columns, _WIDTHS_CM, strict=True):
        column.width = Cm(width)
    for row in table.rows:
        row._tr.get_or_add_trPr().append(OxmlElement("w:cantSplit"))
    table.rows[0]._tr.get_or_add_trPr().append(OxmlElement("w:tblHeader"))
    document.add_heading("Methods", 2)
    document.add_paragraph(checklist.methods)
    document.add_heading("References (BibTeX)", 2)
    for entry in checklist.references:
        document.add_paragraph(entry)
    with atomic_write(path) as part:
        document.save(str(part))


_WRITERS: Mapping[str, Callable[[Checklist, Path, str], None]] = {
    ".html": _write_html, ".md": _write_markdown, ".docx": _write_docx,
}  # fmt: skip
