"""Settings of `init`. `--help` imports this module, so it imports nothing slow."""

from __future__ import annotations

from histopipe.runs.task_config import BagTrainConfig
from histopipe.studies.study_settings import FoldSettings
from histopipe.system.settings import declared_settings
from histopipe.tiling.spec import TilingSpec

INIT_CLASSES = (TilingSpec, BagTrainConfig, FoldSettings)
"""Classes that declare the settings of `init`."""
INIT = ("labels", "patch_size", "mpp", "task", "target", "time", "event", "censored", "folds")
NOT_ASKED = declared_settings(*INIT_CLASSES).keys() - {*INIT}
"""Their settings that are no settings of `init`."""
