"""Test the arguments of the public Python functions, and their progress in a notebook."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import histopipe
from helpers.inline import InlineWorkers
from helpers.paths import GOLDEN
from histopipe.errors import UsageError
from histopipe.inference.options import EmbedOptions, PredictOptions
from histopipe.ingestion.options import (
    SETTING_CLASSES,
    IngestOptions,
    IngestPartOptions,
    MaskOptions,
)
from histopipe.system.settings import declared_settings
from histopipe.viewer.options import ViewOptions


# The Jupyter packages may cause warnings.
@pytest.mark.nightly(reason="starts a kernel of Jupyter")
@pytest.mark.filterwarnings("default")
def test_progress_bars_in_a_notebook(tmp_path: Path) -> None:
    nbformat = importlib.import_module("nbformat")  # no type information
    nbclient = importlib.import_module("nbclient")
    code = (
        "import histopipe\n"
        f"report = histopipe.ingest({str(GOLDEN / 'slides' / 'slide-000.svs')!r}, 'patches.lmdb', patch_size=128)\n"
        "report"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    options = {"kernel_name": "python3", "resources": {"metadata": {"path": tmp_path}}}
    nbclient.NotebookClient(notebook, timeout=300, **options).execute()
    outputs = notebook.cells[0].outputs
    mime_types = {kind for output in outputs for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" in mime_types
    streams = [output.text for output in outputs if output.output_type == "stream"]
    assert "%|" not in "".join(streams)  # no terminal bars
    (result,) = (output for output in outputs if output.output_type == "execute_result")
    assert "patches.lmdb" in result.data["text/plain"]


FUNCTIONS = [
    value
    for value in (getattr(histopipe, name) for name in histopipe.__all__)
    if callable(value) and not isinstance(value, type)
]
NOTHING = "no-such-file"


def wrong_values(annotation: str) -> list[Any]:
    """Return values that an annotation does not allow."""
    is_text = any(name in annotation for name in ("str", "Path"))
    is_number = any(name in annotation for name in ("float", "int"))
    allowed = (
        (None, "None" in annotation),
        (True, "bool" in annotation),
        (3.7, "float" in annotation),
        (3, is_number),
        ("no-such-choice", is_text and not annotation.startswith("Sequence[")),
    )
    wrong = [value for value, is_allowed in allowed if not is_allowed]
    return [object(), b"bytes", *wrong, [object()]]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_wrong_arguments_are_usage_errors(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    required: dict[str, Any] = {
        # Sequence, int
        parameter.name: {"S": [NOTHING], "i": 4}.get(parameter.annotation[0], NOTHING)
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for value in wrong_values(parameter.annotation):
            if parameter.name == "batch_size" and value == "no-such-choice":
                continue  # "auto" is a text
            with pytest.raises(UsageError, match=f"^{parameter.name}: found"):
                if parameter.kind is parameter.VAR_POSITIONAL:
                    function(NOTHING, value)
                else:
                    function(**required | {parameter.name: value})


SETTINGS: dict[str, tuple[type, ...]] = {
    "ingest": (*SETTING_CLASSES, IngestPartOptions),
    "plan": SETTING_CLASSES,
    "import_coords": (IngestOptions,),
    "predict": (PredictOptions,),
    "embed": (EmbedOptions,),
    "tissue": (MaskOptions,),
    "view": (ViewOptions,),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_wrong_settings_are_usage_errors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is started, and nothing is written."""
    monkeypatch.setattr(subprocess, "Popen", None)
    wrong = {f"^{setting}: found": setting for setting in declared_settings(*SETTINGS[name])}
    out = {} if name == "view" else {"out": tmp_path / "out"}
    words = [NOTHING, NOTHING] if name in ("import_coords", "predict") else [NOTHING]
    for message, setting in {**wrong, "unknown options: found colour": "colour"}.items():
        for value in (object(), b"bytes", [object()]):
            with pytest.raises(UsageError, match=message):
                getattr(histopipe, name)(*words, **out, **{setting: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("exclude", "fold", "a list"),
        ("patch_size", 256.5, "a whole number"),
        ("patch_size", "256", "a whole number"),
        ("patch_size", True, "a whole number"),
        ("mpp", "0.5", "a number"),
        ("force", 1, "True or False"),
        ("workers", 0, "1 or more"),
        ("codec", "webp", "'auto' or 'jpeg' or 'png'"),
    ],
)
def test_options_are_never_converted(name: str, value: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^(--)?{name}: found .*{expected}"):
        histopipe.plan(NOTHING, tmp_path / "s.lmdb", **{name: value})


def test_public_functions_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(FUNCTIONS)) == FUNCTIONS  # noqa: S301


def test_iterators_and_numbers_of_numpy_are_lists_and_plain_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check reads an iterator, which can be read only once, and JSON has no numbers of NumPy."""
    monkeypatch.setattr("histopipe.ingestion.preview.WorkerPool", InlineWorkers)
    options: dict[str, Any] = {
        "patch_size": np.int64(64),
        "mpp": np.float32(1),
        "force": np.bool_(False),
        "labels": GOLDEN / "slides" / "labels.csv",
    }
    slides: Any = iter(sorted((GOLDEN / "slides").glob("*.svs"))[:2])
    result = histopipe.plan(slides, tmp_path / "s.lmdb", allow_extra_rows=True, **options)
    assert len(result.slides) == 2
