"""The Python functions of the commands that fill and measure a store: names, options and results."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.slides import make_slides
from histopipe.annotations.rules import AnnotationRules, LabelOptions
from histopipe.cli import COMMANDS
from histopipe.cli.stores import ingest as ingest_command
from histopipe.errors import ExitCode, UsageError
from histopipe.ingestion.ingest import import_coords, ingest
from histopipe.ingestion.options import IMPORT_SETTINGS, INGEST_SETTINGS, IngestPartOptions
from histopipe.ingestion.preview import plan
from histopipe.ingestion.request import read_request
from histopipe.measure.annotate import annotate
from histopipe.measure.quality import quality
from histopipe.measure.staining import StainsResult, stains
from histopipe.system.output import Progress
from histopipe.system.settings import declared_settings
from histopipe.tiling.spec import FINDER_NAMES

SILENT = Progress()
NOT_PARAMETERS = {"config", "as_json", "plan_only", "untrusted"}


pytestmark = pytest.mark.usefixtures("inline_workers")


@pytest.mark.parametrize(
    ("command", "function", "settings"),
    [
        ("ingest", ingest, {*INGEST_SETTINGS, *declared_settings(IngestPartOptions)}),
        (
            "import-coords",
            import_coords,
            {*IMPORT_SETTINGS, *declared_settings(IngestPartOptions)},
        ),
        ("annotate", annotate, {*declared_settings(AnnotationRules, LabelOptions)}),
        ("quality", quality, set()),
        ("stains", stains, set()),
    ],
)
def test_functions_have_options_of_commands(
    command: str, function: Any, settings: set[str]
) -> None:
    assert command in COMMANDS
    module = importlib.import_module(f"histopipe.cli.{COMMANDS[command][0]}")
    parameters = getattr(module, command.replace("-", "_")).params
    flags = {parameter.name for parameter in parameters} - NOT_PARAMETERS
    names = set(inspect.signature(function).parameters) - {"progress", "settings"}
    assert flags == names | settings


def test_coordinates_define_size_scale_and_tissue() -> None:
    assert INGEST_SETTINGS.keys() - IMPORT_SETTINGS.keys() == {
        *("patch_size", "mpp", "mag", "level", "overlap", "edge", "roi"),
        *(
            "tissue",
            "tissue_threshold",
            "tissue_fallback",
            "exclude",
            "tissue_values",
            "tissue_check",
        ),
    }


def test_function_and_command_have_one_default_store() -> None:
    defaults = {parameter.name: parameter.default for parameter in ingest_command.params}
    assert inspect.signature(ingest).parameters["out"].default == defaults["out"]


def test_store_from_functions_only(tmp_path: Path) -> None:
    make_slides(tmp_path / "in", "--size", "1000x1000", "--count", "2")
    (tmp_path / "in" / "bad.svs").write_bytes(b"no slide")
    store = tmp_path / "s.lmdb"
    planned = plan(tmp_path / "in", store, patch_size=128, progress=SILENT)
    assert "slide-000" in repr(planned) and planned.exit_code is ExitCode.PARTLY
    report = ingest(
        str(tmp_path / "in"),
        str(store),
        patch_size=128,
        annotations=tmp_path / "in",
        progress=SILENT,
    )
    assert (list(report.failed), report.exit_code) == (["bad"], ExitCode.PARTLY)
    assert sum(slide.patches for slide in report.slides) == sum(
        record.planned for record in planned.records.values()
    )
    labels = annotate(store, tmp_path / "in", progress=SILENT)
    assert (labels.same, labels.exit_code) == (["slide-000", "slide-001"], ExitCode.DONE)
    measured = quality(store, progress=SILENT)
    assert set(measured.done) == {"slide-000", "slide-001"}
    fitted = stains(store, progress=SILENT)
    assert (fitted.done, stains(store, progress=SILENT).same) == (["slide-000", "slide-001"],) * 2
    assert fitted.exit_code is ExitCode.DONE
    assert StainsResult(done=["a"], failed={"b": "white"}).exit_code is ExitCode.PARTLY
    assert StainsResult(failed={"b": "white"}).exit_code is ExitCode.NOTHING
    for result in (planned, report, labels, measured, fitted):
        assert json.loads(json.dumps(result.to_json()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patchsize": 7}, "unknown options: found patchsize"),
        ({"route": "teleport"}, "route: found 'teleport'"),
        ({"max_unreadable": 7}, "--max-unreadable: found 7"),
        ({"slide_timeout": float("nan")}, "--slide-timeout: found nan"),
        ({"slide_timeout": float("inf")}, "--slide-timeout: found inf, expected more than 0"),
        ({"mag": 0}, "--mag: found 0"),
        ({"workers": 0}, "--workers: found 0"),
        ({"workers": 1.5}, "workers: found 1.5"),
        ({"workers": "2"}, "workers: found '2'"),
        ({"mpp": 0.5, "level": 0}, "expected one of --mpp, --mag and --level"),
        ({"patch_size": 4}, "--patch-size: found 4"),
        ({"default_mpp": 0}, "--default-mpp: found 0"),
        ({"labels": "none.csv"}, "none.csv does not exist"),
        ({"labels": "bad.csv"}, "bad.csv: wrong header"),
        ({"labels": "extra.csv"}, "no slide matches 'nobody'"),
        ({"mpp_csv": "extra.csv"}, "expected slide,mpp"),
        ({"roi": "a"}, "--roi: found no --annotations"),
        ({"exclude": ["a"]}, "--exclude: found no outlines"),
        (
            {"tissue": "otus"},
            f"--tissue: found 'otus', expected otsu, {', '.join(FINDER_NAMES)}, none",
        ),
        ({"tissue": "none.onnx"}, "none.json is missing"),
        ({"tissue_fallback": "otsu"}, "--tissue-fallback: found --tissue otsu, expected a folder"),
    ],
)
def test_wrong_options_raise_usage_error(tmp_path: Path, settings: Any, message: str) -> None:
    """They are found before a slide is opened, and before a worker is started."""
    (tmp_path / "slide-000.svs").touch()
    (tmp_path / "bad.csv").write_text("name,class\n")
    (tmp_path / "extra.csv").write_text("slide,label\nslide-000,x\nnobody,y\n")
    with pytest.raises(UsageError, match=message):
        read_request(tmp_path, tmp_path / "s.lmdb", settings, SILENT)
