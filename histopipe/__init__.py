"""Turn a folder of whole-slide images into a trained model. Every command is a function of the same name.

    import histopipe
    histopipe.ingest("slides/", "patches.lmdb")
    result = histopipe.train("patches.lmdb", out="runs/first")
    dataset = histopipe.load_dataset("patches.lmdb", batch_size=64, seed=1)
    patch = histopipe.open_store("patches.lmdb").read("slide-id", 7)  # (H, W, 3) uint8

Importing this package loads neither TensorFlow nor OpenSlide: each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from histopipe._version import __version__
from histopipe.errors import HistopipeError

_MODULES = {
    "Store": "histopipe.store.store",
    "StoreSet": "histopipe.store.store",
    "annotate": "histopipe.measure.annotate",
    "cohort": "histopipe.cohorts.cohort",
    "compare": "histopipe.studies.compare",
    "cross_validate": "histopipe.studies.cross_validation",
    "doctor": "histopipe.diagnostics.doctor",
    "embed": "histopipe.inference.embed",
    "encoders": "histopipe.pretrained.encoders",
    "export": "histopipe.exporting.export",
    "heatmap": "histopipe.reports.heatmap",
    "import_coords": "histopipe.ingestion.ingest",
    "info": "histopipe.diagnostics.info",
    "ingest": "histopipe.ingestion.ingest",
    "init": "histopipe.studies.study_file",
    "load_dataset": "histopipe.dataset.tf_data",
    "merge": "histopipe.maintenance.merge",
    "open_store": "histopipe.store.store",
    "plan": "histopipe.ingestion.preview",
    "plan_embed": "histopipe.inference.plans",
    "plan_parts": "histopipe.inference.plans",
    "predict": "histopipe.predicting.predict",
    "probe": "histopipe.studies.probe",
    "quality": "histopipe.measure.quality",
    "remove": "histopipe.maintenance.remove",
    "repair": "histopipe.maintenance.repair",
    "report": "histopipe.reports.report",
    "stains": "histopipe.measure.staining",
    "tissue": "histopipe.exporting.masks",
    "train": "histopipe.runs.train",
    "tune": "histopipe.search.tune",
    "verify": "histopipe.maintenance.verify",
    "view": "histopipe.viewer.view",
    "Viewer": "histopipe.viewer.view",
}
"""Module of each public name that is imported at its first use. `__init__.pyi` has the same names for type checkers."""
__all__ = ["HistopipeError", "__version__", *_MODULES]  # noqa: PLE0604 - names, all texts
REMOVED = {
    "bench": "the line at the end of a training that names its bottleneck",
    "compact": "`histopipe remove STORE --compact`",
    "split": "`histopipe merge STORE --slides runs/NAME/slides.csv --subset train --out train.lmdb`",
}
"""What to use instead of commands and functions that were removed in 0.3."""


def __getattr__(name: str) -> Any:
    if name in REMOVED:
        raise AttributeError(f"histopipe.{name} was removed in 0.3: use {REMOVED[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module 'histopipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    arguments = "histopipe.system.settings"
    return value if isinstance(value, type) else importlib.import_module(arguments).checked(value)


def __dir__() -> list[str]:
    return sorted(__all__)
