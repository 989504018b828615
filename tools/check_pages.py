"""Run the commands and the Python code of Markdown pages, in order, and compare their output with the page.

    python tools/check_pages.py README.md docs/tutorial.md docs/tutorial-python.md

All pages run in one empty folder, in the given order. The folder of this Python's commands comes first in PATH.

- A ```console block holds commands after `$ `, each followed by its output. Each line of the page must appear in the
  output, in this order. Numbers may differ, and `...` stands for any lines.
- The ```python blocks of a page are one program. A ```text block after a ```python block holds its output.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parents[1]


@dataclass(slots=True)
class Step:
    """A command, or a block of Python code, with its output on the page."""

    kind: str
    code: str
    line: int
    shown: list[str] = field(default_factory=list)


def steps_of(text: str) -> Iterator[Step]:
    """Yield the commands and Python blocks of a page."""
    blocks = re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    python: Step | None = None
    for block in blocks:
        kind, body = block.groups()
        line = text[: block.start()].count("\n") + 2
        if python and kind == "text":
            python.shown = body.splitlines()
            continue
        if python:
            yield python
        python = Step(kind, body, line) if kind == "python" else None
        if kind == "console":
            yield from _commands(body, line)
    if python:
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
            step.shown.append(text)
    if step:
        yield step


def missing_line(shown: list[str], printed: str) -> str | None:
    """Return the first line of a page that was not printed, or None."""
    lines = iter([_normal(line) for line in printed.splitlines()])
    for line in shown:
        wanted = _normal(line)
        if wanted not in ("", "...") and wanted not in lines:  # `in` advances the iterator
            return line
    return None


def _normal(line: str) -> str:
    """Return a line without its numbers, dates and column widths."""
    line = re.sub(r"\d[\d,.:]*(e[-+]?\d+)?", "#", line)
    return " ".join(re.sub(r"[-─]{3,}", "---", line).split())


def run(step: Step, folder: Path, names: dict[str, object]) -> tuple[bool, str]:
    """Run a step. Return whether it succeeded, and its output."""
    if step.kind == "python":
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.chdir(folder):
                exec(compile(step.code, "page", "exec"), names)  # noqa: S102 - our own documentation
        except Exception:  # noqa: BLE001 - reported with its page and line
            return False, output.getvalue() + traceback.format_exc()
        return True, output.getvalue()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "PROJECT": str(PROJECT),
    }
    done = subprocess.run(
        ["/bin/bash", "-c", step.code], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode == 0, done.stdout


def main() -> int:
    """Run the pages, and return the exit code."""
    parser = argparse.ArgumentParser(description="Run the commands of Markdown pages.")
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, help="empty folder for the run; default: a new one")
    parser.add_argument("--verbose", action="store_true", help="print all output")
    options = parser.parse_args()
    pages = [(page, page.read_text("utf-8")) for page in options.pages]
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for page, text in pages:
            names: dict[str, object] = {"__name__": "__main__"}
            for step in steps_of(text):
                title = step.code if step.kind == "console" else step.code.splitlines()[0]
                print(f"{page}:{step.line}: {title}", flush=True)
                succeeded, printed = run(step, folder, names)
                missing = missing_line(step.shown, printed)
                if options.verbose or not succeeded or missing:
                    print(printed, flush=True)
                if not succeeded or missing:
                    failures += 1
                    print(f"FAILED: {'not printed: ' + missing if missing else 'exit code'}")
    print(f"{failures} failures" if failures else "the output matches all pages")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
