"""From a folder of whole-slide images to a trained patch model.

    import histopipe
    store = histopipe.open_store("patches.lmdb")
    patch = store.read("slide-id", 7)  # (H, W, 3) uint8
    dataset = histopipe.load_dataset("patches.lmdb", batch_size=64, seed=1)
    result = histopipe.train("patches.lmdb", out="runs/first")

Importing this loads neither TensorFlow nor OpenSlide: every name is fetched when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from histopipe._version import __version__
from histopipe.errors import HistopipeError

if TYPE_CHECKING:
    from histopipe.dataset.loader import load_dataset
    from histopipe.inference.embed import embed
    from histopipe.inference.predict import predict
    from histopipe.maintenance.compact import compact
    from histopipe.maintenance.merge import merge
    from histopipe.maintenance.remove import remove
    from histopipe.maintenance.split import split
    from histopipe.maintenance.verify import verify
    from histopipe.measure.annotate import annotate
    from histopipe.measure.quality import measure_quality
    from histopipe.reports.heatmap import heatmap
    from histopipe.reports.report import report
    from histopipe.runs.train import train
    from histopipe.store.store import Store, StoreSet, open_store
    from histopipe.studies.compare import compare
    from histopipe.studies.cross_validation import cross_validate
    from histopipe.studies.tune import tune

__all__ = [
    "HistopipeError",
    "Store",
    "StoreSet",
    "__version__",
    "annotate",
    "compact",
    "compare",
    "cross_validate",
    "embed",
    "heatmap",
    "load_dataset",
    "measure_quality",
    "merge",
    "open_store",
    "predict",
    "remove",
    "report",
    "split",
    "train",
    "tune",
    "verify",
]

_HOME = {
    "Store": "histopipe.store.store",
    "StoreSet": "histopipe.store.store",
    "annotate": "histopipe.measure.annotate",
    "compact": "histopipe.maintenance.compact",
    "compare": "histopipe.studies.compare",
    "cross_validate": "histopipe.studies.cross_validation",
    "embed": "histopipe.inference.embed",
    "heatmap": "histopipe.reports.heatmap",
    "load_dataset": "histopipe.dataset.loader",
    "measure_quality": "histopipe.measure.quality",
    "merge": "histopipe.maintenance.merge",
    "open_store": "histopipe.store.store",
    "predict": "histopipe.inference.predict",
    "remove": "histopipe.maintenance.remove",
    "report": "histopipe.reports.report",
    "split": "histopipe.maintenance.split",
    "train": "histopipe.runs.train",
    "tune": "histopipe.studies.tune",
    "verify": "histopipe.maintenance.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'histopipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
