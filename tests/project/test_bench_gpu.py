"""What users run on their GPU, and the table that is made of their file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.commands import with_tensorflow
from helpers.paths import TOOLS

PROGRAM = TOOLS / "bench_gpu.py"


@pytest.mark.nightly(
    reason="divides the CPU into two devices, so that it needs a process, and trains five networks"
)
def test_everything_but_the_lack_of_memory_runs_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(PROGRAM), "--out", str(out), "--folder", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the figures mean nothing" in done.stdout
    content = json.loads(out.read_text())
    assert content["miniature"] and content["machine"]["gpus"] == []
    stages: dict[str, list[dict[str, Any]]] = {row["stage"]: [] for row in content["rows"]}
    for row in content["rows"]:
        stages[row["stage"]].append(row)
    assert list(stages) == ["train", "embed", "input_wait", "fit", "memory", "logical"]
    errors = [row for row in content["rows"] if "error" in row]
    assert [row["stage"] for row in errors] == ["memory"]
    assert all(row["patches_per_s"] > 0 for row in (*stages["train"], *stages["embed"]))
    assert all(0 <= row["waiting"] <= 1 for row in stages["input_wait"])
    assert len(stages["input_wait"]) == 3
    assert stages["logical"][0]["devices"] == 2 and stages["logical"][0]["difference"] < 1e-4
    refused = subprocess.run(
        [sys.executable, str(PROGRAM), "--table", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1 and "expected a file from a GPU" in refused.stderr


def test_a_table_is_made_of_the_file_of_a_user(tmp_path: Path) -> None:
    machine = {"gpus": ["NVIDIA X"], "cores": 16, "tensorflow": "2.21.0", "cuda": "12.5"}
    rows: list[dict[str, Any]] = [
        {"stage": "embed", "network": "uni", "precision": "float32", "xla": True, "batch": 512}
        | {"patches_per_s": 1234.56},
        {"stage": "input_wait", "network": "train", "patches_per_s": 80.0, "waiting": 0.034},
        {"stage": "memory", "network": "resnet50", "batch": 16384, "micro_batch": 4096},
        {"stage": "logical", "network": "ViT", "devices": 2, "difference": 1.25e-06},
        {"stage": "fit", "error": "no disk"},
    ]
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"machine": machine, "miniature": False, "rows": rows}))
    code = (
        "import sys, pathlib, bench_gpu; print(bench_gpu.table(pathlib.Path(sys.argv[1])), end='')"
    )
    done = with_tensorflow(code, file)
    assert done.stdout.splitlines() == [
        "NVIDIA X, 16 cores; tensorflow 2.21.0, cuda 12.5",
        "",
        "| measurement | network | precision | XLA | patches per step | patches/s | waiting | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| embed | uni | float32 | yes | 512 | 1,235 |  |  |",
        "| input_wait | train |  |  |  | 80 | 3% |  |",
        "| memory | resnet50 |  |  | 16384 |  |  | micro_batch 4096 |",
        "| logical | ViT |  |  |  |  |  | devices 2, difference 1.25e-06 |",
        "| fit |  |  |  |  |  |  | error no disk |",
    ], done.stderr
