"""Finished runs judged by other settings, from their predictions: no model is needed for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from histopipe.evaluation.evaluate import judge
from histopipe.evaluation.predictions_file import read_predictions
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, TrainResult, read_result
from histopipe.runs.settings import to_toml
from histopipe.runs.task_config import load_config
from histopipe.system.files import read_json


def judged_anew(folder: Path, wanted: TrainConfig) -> TrainResult:
    """The result of a finished run, judged as another configuration has it, and written down so.

    Args:
        folder: the run's.
        wanted: whose positive class, threshold, top k and resamples count.

    Raises:
        UsageError, DamagedStore: its files cannot be read.
    """
    result = read_result(folder)
    scores = read_predictions(folder / run_folder.PREDICTIONS)
    own = load_config(folder / run_folder.CONFIG)
    if own.judging == wanted.judging:
        return result
    judged = replace(result, metrics=judge(scores, wanted.judging))
    now = replace(
        own, positive=wanted.positive, threshold=wanted.threshold, top_k=wanted.top_k,
        resamples=wanted.resamples,
    )  # fmt: skip
    facts = read_json(folder / METRICS)
    run_folder.write_metrics(folder, {**facts, **judged.to_json()})
    # Last: until then it is judged anew.
    run_folder.write_text(folder / run_folder.CONFIG, to_toml(now))
    return judged
