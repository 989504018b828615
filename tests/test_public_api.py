"""Test the public Python functions in a script without a main guard and in a notebook."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_public_functions_in_a_script(data: Path, slide: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    annotations = data / "annotations" / "CMU-1-Small-Region.geojson"
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(slide), str(annotations), str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("started") == 1
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["slides"] == 1
    assert counts["patches"] > 500
    assert "<html" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "run" / "metrics.json").exists()
    assert (tmp_path / "predictions" / "patches" / "CMU-1-Small-Region.csv").exists()


# The Jupyter packages may cause warnings.
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
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" in kinds
    assert not any(
        "%|" in output.get("text", "") for output in outputs if output.output_type == "stream"
    )  # no terminal bars
    (result,) = [output for output in outputs if output.output_type == "execute_result"]
    assert "patches.lmdb" in result.data["text/plain"]
    assert (tmp_path / "patches.lmdb" / "data.mdb").exists()
