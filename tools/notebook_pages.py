"""Show the notebooks in docs/notebooks/ as pages of the documentation; a hook of MkDocs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # type: ignore[import-not-found]


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook."""
    for path in sorted((Path(config.docs_dir) / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        text = "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link to the page of a notebook instead of its file."""
    return markdown.replace(".ipynb)", ".md)")


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the Markdown of a cell and of its outputs."""
    if cell["cell_type"] == "markdown":
        yield "".join(cell["source"])
        return
    yield _fenced("".join(cell["source"]), "python")
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        if "image/png" in data:
            yield f"![](data:image/png;base64,{''.join(data['image/png'].split())})"
        else:
            yield _fenced("".join(data["text/plain"]), "text")


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
