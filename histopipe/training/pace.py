"""Measured speed of a training, from which `runs.train` chooses settings for a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from histopipe.runs.config import TrainConfig
from histopipe.runs.supervision import Cluster
from histopipe.runs.train import Pace
from histopipe.runs.training_data import opened_sources, splits_and_slides
from histopipe.system.output import Progress, use_progress
from histopipe.tasks.choices import SUBSETS
from histopipe.training.epochs import NO_REQUEST, Requests
from histopipe.training.outputs import TrainState
from histopipe.training.trainer import Trainer, setup_class

_UNCOUNTED = 2
"""Steps before the counted ones: they trace and compile functions."""


class _Enough(Exception):
    """The steps have taken their time."""


def _seconds_of_step(run: Callable[[Callable[[], Requests]], object], seconds: float) -> float:
    """Return the mean seconds of the steps of `run`, which calls its argument in each step, and ends after `seconds`.

    If there are few steps, the compilation counts, too.
    """
    times = [time.monotonic()]

    def in_step() -> Requests:
        times.append(time.monotonic())
        if len(times) > _UNCOUNTED + 1 and times[-1] > times[_UNCOUNTED] + seconds:
            raise _Enough
        return NO_REQUEST

    with suppress(_Enough):
        run(in_step)
        times.append(time.monotonic())
    counted = times[min(_UNCOUNTED, len(times) - 2) :]
    return (counted[-1] - counted[0]) / (len(counted) - 1)


def measured_pace(config: TrainConfig, seconds: float) -> Pace:
    """Measure steps of a training, and then of a prediction, for so many seconds each; nothing is kept.

    Raises as `train_here`.
    """
    began = time.monotonic()
    with (
        use_progress(Progress()),
        TemporaryDirectory() as scratch,
        opened_sources(config, config.splits) as sources,
    ):
        folder = Path(scratch)
        splits, slides = splits_and_slides(config, sources, folder, resume=False)
        setup = setup_class(config)(config, sources, splits, slides)
        trainer = Trainer(config, folder, setup=setup, cluster=Cluster(), report=lambda *_: None)
        batches, started = trainer.batches["train"], time.monotonic()

        step = _seconds_of_step(
            lambda in_step: trainer.loop.train_epoch(
                batches, TrainState(), "measuring", requests=in_step
            ),
            seconds,
        )
        prediction = _seconds_of_step(partial(trainer.loop.predict, batches, "measuring"), seconds)
        return Pace(
            step / config.batch_size,
            prediction / config.batch_size,
            started - began,
            {
                subset: np.array([(slide.subsets == number).sum() for slide in splits.slides])
                for number, subset in enumerate(SUBSETS)
            },
        )
