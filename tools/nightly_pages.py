"""Run the pages and notebooks that take minutes: each in a new folder, its output compared with the page.

python tools/nightly_pages.py [--tenth I]        all, or at most one of them, chosen by a number from 0 to 9
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
NOTEBOOKS = sorted(
    str(path.relative_to(PROJECT)) for path in (PROJECT / "docs" / "notebooks").glob("*.ipynb")
)
COMMANDS = (
    ("check_pages.py", "docs/tutorial.md", "docs/tutorial-python.md"),
    ("check_pages.py", "docs/how-to/public-archives.md"),
    ("check_pages.py", "docs/how-to/slide-encoders.md"),
    *(("run_notebooks.py", notebook) for notebook in NOTEBOOKS),
)


def main() -> int:
    """Run the pages, and return the exit code."""
    parser = argparse.ArgumentParser(description="Run the pages that take minutes.")
    parser.add_argument(
        "--tenth", type=int, help="run only the page of this number, if there is one"
    )
    tenth = parser.parse_args().tenth
    chosen = COMMANDS if tenth is None else COMMANDS[tenth : tenth + 1]
    failed = [
        " ".join(command)
        for command in chosen
        if subprocess.run(
            [sys.executable, "-P", f"tools/{command[0]}", *command[1:]], cwd=PROJECT, check=False
        ).returncode
    ]
    for command in failed:
        print(f"FAILED: {command}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
