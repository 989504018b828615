"""Test cores of tissue microarrays as entries of a store: from the grid to patches, labels, patients and splits."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shapely
from click.testing import CliRunner
from helpers.microarrays import Array

from histopipe.cli import histopipe
from histopipe.errors import ExitCode, NothingToDo, UsageError
from histopipe.exporting.masks import tissue
from histopipe.ingestion.ingest import ingest
from histopipe.ingestion.ingest_report import IngestReport
from histopipe.measure.annotate import annotate
from histopipe.slides.slide_files import open_slide
from histopipe.slides.staging import StagingArea
from histopipe.splits.labelling import Labelling
from histopipe.splits.splitting import make_splits
from histopipe.store.record import SlideState
from histopipe.store.store import Store
from histopipe.system.output import Progress, Recorder
from histopipe.tiling.core_files import core_region, read_cores, write_cores

ARRAY = Array(rows=3, columns=4, radius=100, spacing=(280, 260), rotation=5, holes=((0, 0), (0, 1)))
TILING = {"mpp": 2.0, "patch_size": 48, "workers": 1, "progress": Progress()}
