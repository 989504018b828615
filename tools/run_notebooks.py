"""Run the notebooks of the documentation, each in a new folder. A cell that fails ends the program.

    python tools/run_notebooks.py                          run all, and show nothing if they succeed
    python tools/run_notebooks.py --update NAME.ipynb      run, and write the outputs into the file

Outputs in the files are those of the last update: pictures, and texts without progress and times.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
_SECONDS = 600
"""Longest time of a cell."""
_BAR = "application/vnd.jupyter.widget-view+json"


def run(path: Path, *, update: bool) -> None:
    """Run a notebook, and write its outputs if asked for."""
    nbformat = importlib.import_module("nbformat")  # no type information
    nbclient = importlib.import_module("nbclient")
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=_SECONDS, resources={"metadata": {"path": folder}}
        )
        client.execute()
    if update:
        for cell in notebook.cells:
            cell.get("metadata", {}).clear()
            if "outputs" in cell:
                cell["outputs"] = list(filter(_is_kept, cell["outputs"]))
        notebook["metadata"] = {"language_info": {"name": "python"}}
        nbformat.write(notebook, path)


def _is_kept(output: Any) -> bool:
    """Return whether an output is no progress: messages on standard error, and bars."""
    return output.get("name") != "stderr" and _BAR not in output.get("data", {})


def main() -> None:
    """Run the given notebooks, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--update", action="store_true")
    chosen = parser.parse_args()
    # The kernel is this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for path in chosen.paths or sorted(FOLDER.glob("*.ipynb")):
        began = time.monotonic()
        run(path, update=chosen.update)
        print(f"{path.name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
