"""Run the commands and the Python code of Markdown pages, in order, and compare their output with the page.

    python tools/check_pages.py docs/tutorial.md docs/tutorial-python.md     in a new folder, with this Python's commands
    python tools/check_pages.py --setup --folder . README.md                 in a checkout, with the commands that install

All commands run in one shell and one folder, in the given order.

- A ```console block holds commands after `$ `, each followed by its output. Each line of the page must appear in the
  output, in this order. Numbers may differ, and `...` stands for any lines.
- The ```python blocks of a page are one program, which runs after the commands of the page. A ```text block after a
  ```python block holds its output.
- A ```sh block holds commands that install or build. They run with `--setup` only.
"""

from __future__ import annotations

import argparse
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


@dataclass(slots=True)
class Step:
    """A command, or the Python program of a page, with its output on the page."""

    kind: str
    code: str
    line: int
    shown: list[str] = field(default_factory=list)


def steps_of(text: str) -> Iterator[Step]:
    """Yield the commands of a page, then its Python program."""
    python = Step("python", "", 0)
    for block in re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        kind, body = block.groups()
        line = text[: block.start()].count("\n") + 2
        if kind == "python":
            python.code += body
            python.line = python.line or line
        elif kind == "text" and python.code:
            python.shown += body.splitlines()
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


class Shell:
    """A bash process, so that `cd` and the activation of an environment affect the next commands."""

    def __init__(self, folder: Path, *, setup: bool) -> None:
        path = os.environ["PATH"]
        environment = {**os.environ, "COLUMNS": "100", "PROJECT": str(PROJECT)}
        if not setup:
            environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
        self._process = subprocess.Popen(
            ["/bin/bash"], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

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
    parser.add_argument("--verbose", action="store_true", help="print all output")
    options = parser.parse_args()
    pages = [(page, page.read_text("utf-8")) for page in options.pages]
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        shell = Shell(folder, setup=options.setup)
        for page, text in pages:
            for step in steps_of(text):
                if step.kind == "sh" and not options.setup:
                    continue
                print(f"{page}:{step.line}: {step.code.splitlines()[0]}", flush=True)
                succeeded, printed = shell.run(step.code)
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
