"""Run the commands and the Python code of Markdown pages, in order, and compare their output with the page.

    python tools/check_pages.py docs/tutorial.md docs/tutorial-python.md     in a new folder, with this Python's commands
    python tools/check_pages.py --setup --folder . README.md                 in a checkout, with the commands that install
    python tools/check_pages.py --update README.md                           write the printed lines into the page

All commands run in one shell and one folder, in the given order.

- A ```console block holds commands after `$ `, each followed by its output. Each line of the page must appear in the
  output, in this order, and `...` stands for any lines. Numbers must be nearly equal, except for times, rates and free
  space, which depend on the machine, and the sizes of reports.
- The ```python blocks of a page are one program, which runs after the commands of the page. A ```text block after a
  ```python block holds its output.
- A ```sh block holds commands that install or build. They run with `--setup` only.
- A command in a comment, `<!-- run: COMMAND -->`, makes the files that the page begins with.

`--update` replaces each line of the page by the printed line with the same text, or else the most similar one. Lines that
have none are reported.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parents[1]
_END = "--- end of the command, exit code "
_NUMBER = re.compile(r"\d[\d,.:]*(?:e[-+]?\d+)?")
_MEASURED = re.compile(
    r"(?<=\[)\d+(?=/\d+\])|\d[\d,.]*(?= ?(?:patches/s|s\b|ms\b|MB free|MB\)$|workers?\b|% waiting))|\d{4}-\d\d-\d\d\S*|\b\d\d?:\d\d\S*"
)
"""Numbers that depend on the machine and the time, places in the order of workers, and sizes of reports."""
_MEASURED_COLUMNS = re.compile(r"patches/s|worker s")
"""Titles of columns of such numbers; titles and numbers end at the same place."""
_TOLERANCE, _TOLERANCE_OF_COUNTS, _LEAST = 0.1, 0.02, 0.05
"""Relative tolerances of decimals and of whole numbers, and the least tolerance of a decimal.

Metrics of a training differ between processors, because sums have another order.
"""
_SIMILAR = 0.6


@dataclass(slots=True)
class Step:
    """A command, or the Python program of a page, with its output on the page."""

    kind: str
    code: str
    line: int
    output: list[tuple[int, str]] = field(default_factory=list)
    """Lines of output, each with its number on the page."""


def steps_of(text: str) -> Iterator[Step]:
    """Yield the commands of a page, then its Python program."""
    python = Step("python", "", 0)
    pattern = r"^<!-- run: (.*?) -->$|^```(\w+)[^\n]*\n(.*?)^```"
    for block in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        hidden, kind, body = block.groups()
        line = text[: block.start()].count("\n") + 2
        if hidden:
            yield Step("hidden", hidden, line - 1)
        elif kind == "python":
            python.code += body
            python.line = python.line or line
        elif kind == "text" and python.code:
            python.output += enumerate(body.splitlines(), line)
        elif kind == "console":
            yield from _commands(body, line)
        elif kind == "sh":
            yield from (
                Step("sh", code, number) for number, code in enumerate(body.splitlines(), line)
            )
    if python.code:
        python.code = f"cat > page.py <<'END'\n{python.code}END\npython page.py"
        yield python


def _commands(body: str, line: int) -> Iterator[Step]:
    step: Step | None = None
    for number, text in enumerate(body.splitlines(), line):
        if text.startswith("$ "):
            if step:
                yield step
            step = Step("console", text[2:], number)
        elif step and step.code.endswith("\\"):
            step.code = step.code[:-1] + " " + text.strip()
        elif step:
            step.output.append((number, text))
    if step:
        yield step


@dataclass(slots=True)
class Line:
    """A line of output: its text without numbers and column widths, and the numbers that every machine prints."""

    line: str
    text: str
    numbers: list[str]


def parse_lines(lines: list[str]) -> list[Line]:
    """Return the lines with their numbers. Columns are those of the last header above, up to an empty line or `...`."""
    parsed, ends = [], set[int]()
    for line in lines:
        if line.strip() in ("", "..."):
            ends = set()
        if not _NUMBER.search(line):
            ends = {title.end() for title in _MEASURED_COLUMNS.finditer(line)} or ends
        measured = {number.start() for number in _MEASURED.finditer(line)}
        numbers = [
            number.group().rstrip(",.:")
            for number in _NUMBER.finditer(line)
            if number.start() not in measured and number.end() not in ends
        ]
        text = re.sub(r"[-─]{3,}", "---", _NUMBER.sub("#", line))
        parsed.append(Line(line, " ".join(text.split()), numbers))
    return parsed


def nearly_equal(page: list[str], printed: list[str]) -> bool:
    """Return whether numbers are equal within the tolerance. Others than plain numbers, such as versions, may differ."""
    if len(page) != len(printed):
        return False
    for texts in zip(page, printed, strict=True):
        try:
            a, b = (float(text.replace(",", "")) for text in texts)
        except ValueError:
            continue
        whole = "." not in texts[0] + texts[1]
        tolerance = _TOLERANCE_OF_COUNTS * abs(a) if whole else max(_TOLERANCE * abs(a), _LEAST)
        if abs(a - b) > tolerance:
            return False
    return True


def compare(page_lines: list[str], printed: str) -> tuple[str | None, list[str]]:
    """Return what differs between the lines of a page and the output, or None; and the page's lines as they were printed."""
    lines, place = parse_lines(printed.splitlines()), 0
    difference, updated = None, []
    for page in parse_lines(page_lines):
        updated.append(page.line)
        if page.text in ("", "..."):
            continue
        same = [i for i in range(place, len(lines)) if lines[i].text == page.text]
        near = [i for i in same if nearly_equal(page.numbers, lines[i].numbers)]
        if not near and difference is None:
            difference = f"not printed: {page.line}"
            if same:
                difference = f"other numbers: {page.line}\n      printed: {lines[same[0]].line}"
        chosen = [*near, *same][:1] or _most_similar(page.text, lines, place)
        if chosen:
            place = chosen[0] + 1
            updated[-1] = lines[chosen[0]].line
    return difference, updated


def _most_similar(text: str, lines: list[Line], place: int) -> list[int]:
    """Return the place of the most similar line from a place on; empty if none is similar."""
    matcher = difflib.SequenceMatcher(b=text)
    ratios = []
    for i, line in enumerate(lines[place:], place):
        matcher.set_seq1(line.text)
        ratios.append((matcher.ratio(), -i))
    ratio, negative = max(ratios, default=(0.0, 0))
    return [-negative] if ratio >= _SIMILAR else []


class Shell:
    """A bash process, so that `cd` and the activation of an environment affect the next commands."""

    def __init__(self, folder: Path, *, setup: bool) -> None:
        path = os.environ["PATH"]
        environment = {**os.environ, "COLUMNS": "100", "PROJECT": str(PROJECT)}
        if not setup:
            environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
        self._process = subprocess.Popen(
            ["/bin/bash"],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, code: str) -> tuple[bool, str]:
        """Run a command. Return whether it succeeded, and its output."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the shell has no pipes")
        self._process.stdin.write(f"{{ {code}\n}} </dev/null; printf '\\n{_END}%d\\n' $?\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith(_END):
                return line.strip() == f"{_END}0", "".join(lines)
            lines.append(line)
        raise RuntimeError(f"the shell ended: {code}")


def main() -> int:
    """Run the pages, and return the exit code."""
    parser = argparse.ArgumentParser(description="Run the commands of Markdown pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, help="empty folder for the run; default: a new one")
    parser.add_argument("--setup", action="store_true", help="run the ```sh blocks too")
    parser.add_argument(
        "--update", action="store_true", help="write the printed lines into the pages"
    )
    parser.add_argument("--commands", action="store_true", help="leave out the Python program")
    parser.add_argument("--verbose", action="store_true", help="print all output")
    options = parser.parse_args()
    pages = [(page, page.read_text("utf-8")) for page in options.pages]
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        shell = Shell(folder, setup=options.setup)
        for page, text in pages:
            lines = text.splitlines()
            for step in steps_of(text):
                if (step.kind == "sh" and not options.setup) or (
                    step.kind == "python" and options.commands
                ):
                    continue
                print(f"{page}:{step.line}: {step.code.splitlines()[0]}", flush=True)
                succeeded, printed = shell.run(step.code)
                difference, updated = compare([line for _, line in step.output], printed)
                if options.update and succeeded and difference:
                    for (number, _), line in zip(step.output, updated, strict=True):
                        lines[number - 1] = line
                    print(f"UPDATED: {difference}")
                    difference = compare(updated, printed)[0]
                if options.verbose or not succeeded or difference:
                    print(printed, flush=True)
                if not succeeded or difference:
                    failures += 1
                    print(f"FAILED: {difference or 'exit code'}")
            if options.update:
                page.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{failures} failures" if failures else "the output matches all pages")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
