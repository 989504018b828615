"""Write docs/reference/json-schemas.json: a JSON schema for what each command prints with `--json`.

    python tools/json_schemas.py [FILE]

Schemas are made from the fields of the results of the public functions. Those of results that have another form in JSON
are in `FORMS`. Fields may be added in later versions, so that unknown ones are allowed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from histopipe.cohorts.cohort import CohortResult
from histopipe.diagnostics.doctor import DoctorReport
from histopipe.diagnostics.info import FolderInfo
from histopipe.exporting.export import IndexResult
from histopipe.exporting.exported_models import ModelExport
from histopipe.exporting.patches import ExportResult
from histopipe.inference.embed import EmbedResult
from histopipe.inference.plans import EmbedPlan
from histopipe.ingestion.ingest_report import IngestReport
from histopipe.ingestion.preview import IngestPreview
from histopipe.maintenance.checks import VerifyResult
from histopipe.maintenance.merge import CopyResult
from histopipe.maintenance.repair import RepairResult
from histopipe.maintenance.store_info import StoreInfo
from histopipe.measure.annotate import AnnotateResult
from histopipe.measure.quality import QualityResult
from histopipe.measure.staining import StainsResult
from histopipe.predicting.external_evaluation import PredictResult
from histopipe.reports.heatmap import HeatmapResult
from histopipe.reports.report import ReportResult
from histopipe.studies.probe import ProbeResult
from histopipe.studies.study_file import InitResult
from histopipe.system.shared_folders import PartsPlan
from histopipe.tiling.mask_files import TissueReport

PATH = Path(__file__).parents[1] / "docs" / "reference" / "json-schemas.json"
_PLAIN: Mapping[Any, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_METRICS = {"type": "object", "description": "Metrics by level, see docs/reference/metrics.md."}
_NUMBERS = {"type": "object", "additionalProperties": {"type": ["number", "null"]}}
_TEXT, _NUMBER, _WHOLE, _TABLE = (
    {"type": kind} for kind in ("string", "number", "integer", "object")
)
_MAYBE = {"type": ["number", "null"]}
Schema = dict[str, Any]


def form(**fields: Any) -> Schema:
    """Return the schema of an object with required fields."""
    return {"type": "object", "required": [*fields], "properties": fields}


def listed(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


_TRAINED = form(
    folder=_TEXT,
    epochs=_WHOLE,
    best_epoch=_WHOLE,
    seconds=_NUMBER,
    host_bytes=_WHOLE,
    breakdown=_TABLE,
    flow=_TABLE,
    shares=_NUMBERS,
)
_TRAINED["properties"] |= {"validation": _METRICS, "test": _METRICS}
_FOLDS = form(
    folder=_TEXT,
    folds=listed(_TABLE),
    mean=_NUMBERS,
    deviation=_NUMBERS,
    pooled={"type": ["object", "null"]},
    breakdown=_TABLE,
    flow=_TABLE,
)
_TRIAL = form(
    trial=_WHOLE,
    state=_TEXT,
    value=_MAYBE,
    epochs={"type": ["integer", "null"]},
    seconds=_MAYBE,
    reason={"type": ["string", "null"]},
)
_PREDICTED = {"metrics": _METRICS, "breakdown": _TABLE}
FORMS: Mapping[str, Schema] = {
    "train": {"type": "object", "anyOf": [_TRAINED, _FOLDS], "required": ["folder"]},
    "tune": form(folder=_TEXT, best={"type": ["integer", "null"]}, trials=listed(_TRIAL)),
    "compare": form(
        runs=listed(form(folder=_TEXT, test=_METRICS, notes=listed(_TEXT), breakdown=_TABLE)),
        differences=listed(form(folder=_TEXT, less=_TEXT, notes=listed(_TEXT))),
        settings=_TABLE,
    ),
    "encoders": {
        "type": "object",
        "additionalProperties": form(
            name=_TEXT, licence=_TEXT, dimension={"type": ["integer", "null"]}
        ),
    },
    "view": form(url=_TEXT, host=_TEXT, port=_WHOLE, token=_TEXT, slides=_WHOLE),
}
"""Schemas of results that have another form in JSON than their fields."""
RESULTS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "init": ((InitResult,), "The file of a study, and the commands that take it."),
    "cohort": ((CohortResult,), "The labels file; slides that were used, and left out by reason."),
    "tissue": ((TissueReport,), "The tissue of every slide, and failed slides by reason."),
    "tissue --plan": ((PartsPlan,), "Slides and work of each part."),
    "ingest": ((IngestReport,), "Every slide with its state, and totals."),
    "ingest --plan": ((IngestPreview,), "Every slide with its level and patches, and totals."),
    "import-coords": ((IngestReport,), "Every slide with its state, and totals."),
    "annotate": ((AnnotateResult,), "Labelled slides, numbers of patches, and remarks."),
    "quality": ((QualityResult,), "Measured slides, and medians."),
    "stains": (
        (StainsResult,),
        "Slides that were fitted now or before, and failed slides by reason.",
    ),
    "info": ((StoreInfo, FolderInfo), "The contents of a store, or of a folder of results."),
    "export": (
        (ExportResult, IndexResult, TissueReport, ModelExport),
        "Files and patches; rows of an index; masks; or files of a model.",
    ),
    "export --plan": ((PartsPlan,), "Slides and work of each part."),
    "train": ((), "Metrics of the best epoch, as in metrics.json; with folds, those of all."),
    "tune": ((), "All trials, and the number of the best."),
    "encoders": ((), "Named encoders by name."),
    "embed": ((EmbedResult,), "Slides that are done, kept from before, or failed."),
    "embed --plan": ((EmbedPlan,), "Slides of each part, time, memory and disk."),
    "probe": ((ProbeResult,), "Scores of each folder of features."),
    "predict": ((PredictResult,), "Slides that are done, kept from before, or failed; metrics."),
    "predict --plan": ((PartsPlan,), "Slides and work of each part."),
    "view": ((), "The address of the page."),
    "heatmap": ((HeatmapResult,), "Files by slide, and failed slides by reason."),
    "report": ((ReportResult,), "The file, and the model card."),
    "compare": ((), "Metrics of runs, and differences from the first with intervals."),
    "verify": ((VerifyResult,), "Findings of damage."),
    "repair": ((RepairResult,), "Slides that were repaired or not, and remaining damage."),
    "merge": ((CopyResult,), "Copied slides and patches."),
    "doctor": ((DoctorReport,), "Checks of the machine, and what to do."),
}
_REMOVED = {"predict": ("evaluated",), "ingest --plan": ("records",)}
_ADDED: Mapping[str, Schema] = {
    "predict": _PREDICTED,
    "ingest --plan": {"slides": listed(form(id=_TEXT, status=_TEXT, reason=_TEXT))},
    "verify": {"damaged_slides": listed(_TEXT)},
}


def schema_of(hint: Any) -> Schema:  # noqa: PLR0911 - one for each kind
    """Return the schema of the JSON form of values that an annotation allows."""
    origin, parts = get_origin(hint), get_args(hint)
    hint = getattr(hint, "__supertype__", hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Literal:
        return {"enum": [*parts]}
    if origin in (Union, types.UnionType):
        schemas = [schema_of(part) for part in parts]
        if all(schema.keys() == {"type"} for schema in schemas):
            names = list(dict.fromkeys(schema["type"] for schema in schemas))
            return {"type": names if len(names) > 1 else names[0]}
        return {"anyOf": schemas}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(parts[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        item_schemas = [schema_of(part) for part in parts if part is not ...]
        items = (
            item_schemas[0]
            if all(kind == item_schemas[0] for kind in item_schemas)
            else {"anyOf": item_schemas}
        )
        return {"type": "array", "items": items}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return form(**{f.name: schema_of(hints[f.name]) for f in dataclasses.fields(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum | Path):
        return {"type": "string"}
    return {}


def schemas() -> dict[str, Schema]:
    """Return the schema of each command."""
    definitions = {}
    for command, (results, description) in RESULTS.items():
        each = [schema_of(result) for result in results]
        for result, schema in zip(results, each, strict=True):
            if hasattr(result, "exit_code"):
                schema["properties"]["exit_code"] = {"type": "integer"}
                schema["required"].append("exit_code")
        schema = FORMS.get(command) or (each[0] if len(each) == 1 else {"anyOf": each})
        for name in _REMOVED.get(command, ()):
            schema["required"].remove(name)
            del schema["properties"][name]
        schema.get("properties", {}).update(_ADDED.get(command, {}))
        definitions[command] = {"description": description, "type": "object", **schema}
    return definitions


def main() -> None:
    """Write the file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "What histopipe prints with --json, by command",
        "$defs": schemas(),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
