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
from typing import TYPE_CHECKING, Any

from histopipe._version import __version__
from histopipe.errors import HistopipeError

if TYPE_CHECKING:
    from histopipe.cohorts.cohort import cohort
    from histopipe.dataset.tf_data import load_dataset
    from histopipe.diagnostics.doctor import doctor
    from histopipe.exporting.export import export
    from histopipe.inference.embed import embed
    from histopipe.inference.plans import plan_embed, plan_parts
    from histopipe.inference.predict import predict
    from histopipe.ingestion.preview import plan
    from histopipe.ingestion.request import import_coords, ingest
    from histopipe.maintenance.merge import merge
    from histopipe.maintenance.remove import remove
    from histopipe.maintenance.repair import repair
    from histopipe.maintenance.verify import verify
    from histopipe.measure.annotate import annotate
    from histopipe.measure.quality import quality
    from histopipe.measure.stains import stains
    from histopipe.pretrained.encoders import encoders
    from histopipe.reports.heatmap import heatmap
    from histopipe.reports.info import info
    from histopipe.reports.report import report
    from histopipe.reports.tissue import tissue
    from histopipe.runs.train import train
    from histopipe.store.store import Store, StoreSet, open_store
    from histopipe.studies.compare import compare
    from histopipe.studies.cross_validation import cross_validate
    from histopipe.studies.probe import probe
    from histopipe.studies.study_file import init
    from histopipe.studies.tune import tune
    from histopipe.viewer.view import Viewer, view

__all__ = [
    "HistopipeError",
    "Store",
    "StoreSet",
    "Viewer",
    "__version__",
    "annotate",
    "cohort",
    "compare",
    "cross_validate",
    "doctor",
    "embed",
    "encoders",
    "export",
    "heatmap",
    "import_coords",
    "info",
    "ingest",
    "init",
    "load_dataset",
    "merge",
    "open_store",
    "plan",
    "plan_embed",
    "plan_parts",
    "predict",
    "probe",
    "quality",
    "remove",
    "repair",
    "report",
    "stains",
    "tissue",
    "train",
    "tune",
    "verify",
    "view",
]

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
    "import_coords": "histopipe.ingestion.request",
    "info": "histopipe.reports.info",
    "ingest": "histopipe.ingestion.request",
    "init": "histopipe.studies.study_file",
    "load_dataset": "histopipe.dataset.tf_data",
    "merge": "histopipe.maintenance.merge",
    "open_store": "histopipe.store.store",
    "plan": "histopipe.ingestion.preview",
    "plan_embed": "histopipe.inference.plans",
    "plan_parts": "histopipe.inference.plans",
    "predict": "histopipe.inference.predict",
    "probe": "histopipe.studies.probe",
    "quality": "histopipe.measure.quality",
    "remove": "histopipe.maintenance.remove",
    "repair": "histopipe.maintenance.repair",
    "report": "histopipe.reports.report",
    "stains": "histopipe.measure.stains",
    "tissue": "histopipe.reports.tissue",
    "train": "histopipe.runs.train",
    "tune": "histopipe.studies.tune",
    "verify": "histopipe.maintenance.verify",
    "view": "histopipe.viewer.view",
    "Viewer": "histopipe.viewer.view",
}
"""Module of each public name that is imported at its first use."""
REMOVED = {
    "bench": "the line at the end of a training that names its bottleneck",
    "compact": "`histopipe remove STORE --compact`",
    "pull": "`rclone copy REMOTE:BUCKET/STORE STORE`, then `histopipe verify STORE`",
    "push": "`rclone copy STORE REMOTE:BUCKET/STORE`",
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
