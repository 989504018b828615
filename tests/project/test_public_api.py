"""Test the public Python functions in a script without a main guard and in a notebook."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import subprocess
import sys
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
from histopipe.ingestion.options import SETTING_CLASSES, ClusterOptions, IngestOptions, MaskOptions
from histopipe.system.settings import declared_settings
from histopipe.viewer.options import ViewOptions

# The script has no main guard on purpose: worker processes must not run a user's script again. `plan` is called before
# `ingest`, because importing a module must not replace the function of the same name.
SCRIPT = """
import json
import sys
import histopipe

slide, annotations, folder = sys.argv[1:]
store = f"{folder}/patches.lmdb"
print("started")
results = {
    "plan": histopipe.plan(slide, store, patch_size=64),
    "ingest": histopipe.ingest(slide, store, patch_size=64),
    "annotate": histopipe.annotate(store, annotations),
    "quality": histopipe.quality(store),
}
results["train"] = histopipe.train(
    store, out=f"{folder}/run", labels_from="annotation", split_by="region", region_um=300.0,
    epochs=1, batch_size=32,
)
results["predict"] = histopipe.predict(f"{folder}/run", slide, out=f"{folder}/predictions")
results["report"] = histopipe.report(f"{folder}/run", out=f"{folder}/report.html")
for name, result in results.items():
    assert str(result) and len(repr(result)) < 20_000, name
    json.dumps(result.to_json())
with histopipe.open_store(store) as opened:
    print(json.dumps({"slides": len(opened.slides), "patches": len(opened)}))
"""


@pytest.fixture
def slide(data: Path) -> Path:
    return data / "slides" / "CMU-1-Small-Region.svs"


@pytest.mark.nightly(
    reason="the full pipeline in a new process; test_workers_do_not_import_main_module shows that no main guard is needed"
)
def test_public_functions_in_a_script(data: Path, slide: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    annotations = data / "annotations" / "CMU-1-Small-Region.geojson"
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(slide), str(annotations), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("started") == 1
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["slides"] == 1
    assert counts["patches"] > 500
    assert "<html" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "run" / "metrics.json").exists()
    assert (tmp_path / "predictions" / "patches" / "CMU-1-Small-Region.csv").exists()


# The Jupyter packages may cause warnings.
@pytest.mark.nightly(reason="starts a kernel of Jupyter")
@pytest.mark.filterwarnings("default")
def test_progress_bars_in_a_notebook(slide: Path, tmp_path: Path) -> None:
    nbformat = importlib.import_module("nbformat")  # no type information
    nbclient = importlib.import_module("nbclient")
    code = (
        "import histopipe\n"
        f"report = histopipe.ingest({str(slide)!r}, 'patches.lmdb', patch_size=128)\n"
        "report"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = notebook.cells[0].outputs
    mime_types = {kind for output in outputs for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" in mime_types
    assert not any(
        "%|" in output.get("text", "") for output in outputs if output.output_type == "stream"
    )  # no terminal bars
    (result,) = [output for output in outputs if output.output_type == "execute_result"]
    assert "patches.lmdb" in result.data["text/plain"]
    assert (tmp_path / "patches.lmdb" / "data.mdb").exists()


FUNCTIONS = [
    value
    for value in (getattr(histopipe, name) for name in histopipe.__all__)
    if callable(value) and not isinstance(value, type)
]
NOTHING = "no-such-file"


def wrong_values(annotation: str) -> list[Any]:
    """Return values that an annotation does not allow."""
    text = "str" in annotation or "Path" in annotation
    wrong: list[Any] = [object(), b"bytes"]
    wrong += [] if "None" in annotation else [None]
    wrong += [] if "bool" in annotation else [True]
    wrong += [] if "float" in annotation else [3.7]
    wrong += [] if "float" in annotation or "int" in annotation else [3]
    wrong += [] if text and not annotation.startswith("Sequence[") else ["no-such-choice"]
    return [*wrong, [object()]]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_wrong_arguments_are_usage_errors(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
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
    "ingest": (*SETTING_CLASSES, ClusterOptions),
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

    def call(**settings: Any) -> None:
        out = {} if name == "view" else {"out": tmp_path / "out"}
        words = [NOTHING, NOTHING] if name in ("import_coords", "predict") else [NOTHING]
        getattr(histopipe, name)(*words, **out, **settings)

    for setting in declared_settings(*SETTINGS[name]):
        for value in (object(), b"bytes", [object()]):
            with pytest.raises(UsageError, match=f"^{setting}: found"):
                call(**{setting: value})
    with pytest.raises(UsageError, match="unknown options: found colour"):
        call(colour=3)
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


def test_choices_are_named() -> None:
    expected = r"side: found 'val', expected 'train' or 'validation' or 'test'"
    with pytest.raises(UsageError, match=expected):
        histopipe.load_dataset("none", batch_size=4, splits="splits.json", side="val")  # type: ignore[arg-type]


def test_public_functions_can_be_pickled() -> None:
    for function in FUNCTIONS:
        assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301
        assert getattr(histopipe, function.__name__) is function


def test_iterators_and_numbers_of_numpy_are_lists_and_plain_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check reads an iterator, which can be read only once, and JSON has no numbers of NumPy."""
    options: dict[str, Any] = {
        "patch_size": np.int64(64),
        "mpp": np.float32(1),
        "force": np.bool_(False),
        "labels": GOLDEN / "slides" / "labels.csv",
    }
    monkeypatch.setattr("histopipe.ingestion.preview.WorkerPool", InlineWorkers)
    slides: Any = iter(sorted((GOLDEN / "slides").glob("*.svs"))[:2])
    result = histopipe.plan(slides, tmp_path / "s.lmdb", allow_extra_rows=True, **options)
    assert len(result.slides) == 2
