"""Types of the public names, which `__init__.py` imports at their first use."""

from histopipe._version import __version__ as __version__
from histopipe.cohorts.cohort import cohort as cohort
from histopipe.dataset.tf_data import load_dataset as load_dataset
from histopipe.diagnostics.doctor import doctor as doctor
from histopipe.diagnostics.info import info as info
from histopipe.errors import HistopipeError as HistopipeError
from histopipe.exporting.export import export as export
from histopipe.exporting.masks import tissue as tissue
from histopipe.inference.embed import embed as embed
from histopipe.inference.plans import plan_embed as plan_embed
from histopipe.inference.plans import plan_parts as plan_parts
from histopipe.ingestion.preview import plan as plan
from histopipe.ingestion.request import import_coords as import_coords
from histopipe.ingestion.request import ingest as ingest
from histopipe.maintenance.merge import merge as merge
from histopipe.maintenance.remove import remove as remove
from histopipe.maintenance.repair import repair as repair
from histopipe.maintenance.verify import verify as verify
from histopipe.measure.annotate import annotate as annotate
from histopipe.measure.quality import quality as quality
from histopipe.measure.quality import stains as stains
from histopipe.predicting.predict import predict as predict
from histopipe.pretrained.encoders import encoders as encoders
from histopipe.reports.heatmap import heatmap as heatmap
from histopipe.reports.report import report as report
from histopipe.runs.train import train as train
from histopipe.search.tune import tune as tune
from histopipe.store.store import Store as Store
from histopipe.store.store import StoreSet as StoreSet
from histopipe.store.store import open_store as open_store
from histopipe.studies.compare import compare as compare
from histopipe.studies.cross_validation import cross_validate as cross_validate
from histopipe.studies.probe import probe as probe
from histopipe.studies.study_file import init as init
from histopipe.viewer.view import Viewer as Viewer
from histopipe.viewer.view import view as view

__all__: list[str]
REMOVED: dict[str, str]
