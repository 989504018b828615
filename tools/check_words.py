"""Find words that make a text hard to read: in Python comments and strings, Markdown, templates and configuration files.

    python tools/check_words.py              all files that git tracks; exit code 1 if a word is found
    python tools/check_words.py --count      print only the number of findings per word

Each word in `WORDS` has a plain replacement. `ALLOWED` lists correct uses, with the reasons.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

WORDS = {
    r"tells?|told|telling": "show, print, report, name",
    r"said|says|saying": "state, show, report",
    r"beside|besides": "next to; in addition to",
    r"at hand": "available",
    r"in words": "(leave out)",
    r"look(s|ed|ing)? at": "check, examine, read",
    r"held against|hold (\w+ )?against": "compare with",
    r"(is|are|was) at(?! (least|most|\d))": "the exact verb: is processing, has reached",
    r"lies|lie": "be, be located",
    r"befell|befalls?": "happen",
    r"strangers?(?:'s)?": "unknown source, untrusted",
    r"made (slides?|data|stores?|tissue|encoders?|pictures?|patches)": "synthetic",
    r"of (its|their|his|our|one's) own": "separate, own",
    r"whatever|whoever|whichever": "any, every",
    r"gives? out|given out|giving out": "assign, print",
    r"by themselves|by itself": "alone, separately, automatically",
    r"as (it is|they are)": "unchanged",
    r"what (\w+ ){1,2}(is|are) of": "the noun",
}
"""Patterns of flagged words, and what to write instead."""

ALLOWED = {
    ("tests/cli/test_cli.py", "told"): "test of this check",
    ("tests/cli/test_cli.py", "at hand"): "test of this check",
    ("tests/cli/test_cli.py", "tranger"): "test of this check",
    ("tests/cli/test_cli.py", "as it is"): "test of this check",
}
"""Allowed lines, by file and text, with the reason."""

FILES = (
    "*.py",
    "*.md",
    "*.html",
    "*.css",
    "*.js",
    "*.toml",
    "*.yml",
    "*.yaml",
    "*.cff",
    "*.svg",
    "*.j2",
    "*.sbatch",
)
FILES_BY_NAME = ("Makefile", ".ci/run", "docker/*")

_PATTERN = re.compile(
    "|".join(rf"(?P<w{i}>\b(?:{p})\b)" for i, p in enumerate(WORDS)), re.IGNORECASE
)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line: comments and strings of Python, Markdown outside of code, all of other files."""
    if path.suffix == ".py":
        names = {
            tokenize.COMMENT,
            tokenize.STRING,
            getattr(tokenize, "FSTRING_MIDDLE", -1),
        }  # 3.12 and later
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type in names:
                    yield from enumerate(token.string.splitlines(), token.start[0])
        return
    lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    if path.suffix != ".md":
        yield from lines
        return
    fenced = False
    for number, line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "``", line)


def findings(path: Path) -> Iterator[tuple[int, str, str, str]]:
    """Yield line number, word, replacement and line of each flagged word."""
    replacements = list(WORDS.values())
    for number, line in texts_of(path):
        if any(name == str(path) and text in line for name, text in ALLOWED):
            continue
        for match in _PATTERN.finditer(line):
            index = int((match.lastgroup or "w0")[1:])
            yield number, match.group().lower(), replacements[index], line.strip()


def main() -> int:
    """Print the findings, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true")
    parser.add_argument("files", nargs="*", type=Path, help="default: all files that git tracks")
    options = parser.parse_args()
    command = ["git", "ls-files", *FILES, *FILES_BY_NAME]
    files = options.files or [
        Path(name) for name in subprocess.check_output(command, text=True).split()
    ]
    counts: Counter[str] = Counter()
    for path in files:
        if path == Path("tools/check_words.py"):
            continue  # it lists the words
        for number, word, replacement, line in findings(path):
            counts[word] += 1
            if not options.count:
                print(f"{path}:{number}: {word!r}; write: {replacement}\n    {line}")
    for word, count in counts.most_common() if options.count else []:
        print(f"{count:5} {word}")
    print(f"{counts.total()} flagged words")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
