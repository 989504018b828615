"""What users run on their GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import TOOLS


@pytest.mark.nightly(
    reason="divides the CPU into two devices, so that it needs a process, and trains five networks"
)
def test_every_stage_runs_without_a_gpu(tmp_path: Path) -> None:
    def run_program(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOLS / "bench_gpu.py"), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    out = tmp_path / "gpu.json"
    done = run_program("--miniature", "--out", out, "--folder", tmp_path / "data")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the figures mean nothing" in done.stdout
    content = json.loads(out.read_text())
    assert content["miniature"] and content["machine"]["gpus"] == []
    stages = defaultdict[str, list[dict[str, Any]]](list)
    for row in content["rows"]:
        stages[row["stage"]].append(row)
    assert list(stages) == [*content["stages"]]
    assert [row["stage"] for row in content["rows"] if "error" in row] == []
    assert all(row["patches_per_s"] > 0 for row in (*stages["train"], *stages["embed"]))
    assert all(0 <= row["waiting"] <= 1 for row in stages["embed"][1:])
    assert len(stages["embed"]) == 3
    assert stages["logical"][0]["devices"] == 2 and stages["logical"][0]["difference"] < 1e-4
    refused = run_program("--table", out)
    assert refused.returncode == 1 and "expected a file from a GPU" in refused.stderr
