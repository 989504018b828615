"""The Python functions of the commands that fill and measure a store: names, options and results."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import make_slides
from inline import Run, in_process

from histopipe.cli import COMMANDS
from histopipe.cli.ingestion import ingest as ingest_command
from histopipe.errors import ExitCode, UsageError
from histopipe.geometry import Mpp
from histopipe.ingestion.ingest import import_coords, ingest
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.preview import plan
from histopipe.ingestion.request import ImportSettings, IngestSettings
from histopipe.measure.annotate import annotate
from histopipe.measure.quality import quality
from histopipe.measure.stains import StainsResult, stains
from histopipe.system.progress import SilentProgress
from histopipe.tiling.spec import TilingSpec, resolved_tissue

SILENT = SilentProgress()
NOT_PARAMETERS = {"as_json", "plan_only", "untrusted"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return in_process(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("command", "function", "settings"),
    [
        ("ingest", ingest, IngestSettings),
        ("import-coords", import_coords, ImportSettings),
        ("annotate", annotate, None),
        ("quality", quality, None),
        ("stains", stains, None),
    ],
)
def test_functions_have_options_of_commands(command: str, function: Any, settings: Any) -> None:
    assert command in COMMANDS
    module = importlib.import_module(f"histopipe.cli.{COMMANDS[command][0]}")
    parameters = getattr(module, command.replace("-", "_")).params
    flags = {parameter.name for parameter in parameters} - NOT_PARAMETERS
    names = set(inspect.signature(function).parameters) - {"progress", "settings"}
    assert flags == names | set(settings.__annotations__ if settings else ())
    if settings is IngestSettings:
        assert all(name in (function.__doc__ or "") for name in flags)


def test_functions_have_defaults_of_commands() -> None:
    flags = {parameter.name: parameter for parameter in ingest_command.params}
    assert resolved_tissue("otsu", None) == TilingSpec(mpp=Mpp(0.5)).tissue
    compared = 0
    for options in (TilingSpec(mpp=Mpp(0.5)), IngestOptions()):
        for field in dataclasses.fields(options):
            flag = flags.get(field.name)
            if flag is not None and isinstance(flag.default, str | int | float):
                expected = flag.type.convert(flag.default, flag, None)
                assert getattr(options, field.name) == expected, field.name
                compared += 1
    assert compared >= 8
    assert inspect.signature(ingest).parameters["out"].default == flags["out"].default
    assert inspect.signature(ingest).parameters["part_gb"].default == flags["part_gb"].default


def test_store_from_functions_only(tmp_path: Path, run: Run) -> None:
    make_slides(tmp_path / "in", "--size", "1000x1000", "--count", "2")
    (tmp_path / "in" / "bad.svs").write_bytes(b"no slide")
    store = tmp_path / "s.lmdb"
    planned = plan(tmp_path / "in", store, patch_size=128, progress=SILENT)
    assert "slide-000" in repr(planned) and planned.exit_code is ExitCode.PARTLY
    report = ingest(
        str(tmp_path / "in"), str(store), patch_size=128, annotations=tmp_path / "in", progress=SILENT
    )  # fmt: skip
    assert list(report.failed) == ["bad"]
    assert report.exit_code is ExitCode.PARTLY
    assert "ingested           2" in repr(report) and "failed bad: " in repr(report)
    assert sum(s.patches for s in report.slides) == sum(
        s.record.planned for s in planned.slides if s.record
    )
    labels = annotate(store, tmp_path / "in", progress=SILENT)
    assert (labels.same, labels.exit_code) == (["slide-000", "slide-001"], ExitCode.DONE)
    assert "2 already labelled" in repr(labels)
    measured = quality(store, progress=SILENT)
    assert set(measured.done) == {"slide-000", "slide-001"}
    assert f"{measured.patches:,} patches" in repr(measured)
    fitted = stains(store, progress=SILENT)
    assert (fitted.done, stains(store, progress=SILENT).same) == (["slide-000", "slide-001"],) * 2
    assert fitted.exit_code is ExitCode.DONE
    assert StainsResult(done=["a"], failed={"b": "white"}).exit_code is ExitCode.PARTLY
    assert StainsResult(failed={"b": "white"}).exit_code is ExitCode.NOTHING
    for result in (planned, report, labels, measured, fitted):
        assert json.loads(json.dumps(result.to_json()))
        assert type(result).__dataclass_params__.frozen  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patchsize": 7}, "unknown options: found patchsize"),
        ({"route": "teleport"}, "route: found 'teleport'"),
        ({"max_unreadable": 7}, "--max-unreadable: found 7"),
        ({"slide_timeout": float("nan")}, "--slide-timeout: found nan"),
        ({"mag": 0}, "--mag: found 0"),
        ({"workers": 0}, "workers: found 0"),
        ({"workers": 1.5}, "workers: found 1.5"),
        ({"workers": "2"}, "workers: found '2'"),
    ],
)
def test_wrong_options_raise_usage_error(tmp_path: Path, settings: Any, message: str) -> None:
    make_slides(tmp_path / "in", "--size", "600x600")
    with pytest.raises(UsageError, match=message):
        ingest(tmp_path / "in", tmp_path / "s.lmdb", progress=SILENT, **settings)
    assert not (tmp_path / "s.lmdb").exists()


SCRIPT = """
from histopipe.geometry import Mpp
from histopipe.ingestion.ingest import ingest
report = ingest("in", "s.lmdb", patch_size=64, workers=2)
print(len(report.slides), report.exit_code)
"""


def test_script_without_main_guard(tmp_path: Path) -> None:
    make_slides(tmp_path / "in", "--size", "600x600")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )  # fmt: skip
    assert done.stdout == "1 0\n"
    assert "[1/1] complete slide-000" in done.stderr
