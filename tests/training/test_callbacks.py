"""Callbacks of a training: each epoch once, in the process of the caller; or all methods, with the model."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

import histopipe
from helpers.bags import TARGET_BAGS
from histopipe.errors import DamagedStore, UsageError
from histopipe.runs.folder import HISTORY
from histopipe.runs.observers import Observation
from histopipe.system.output import Progress
from histopipe.system.table_files import write_dicts

CELL = """
class Losses:
    def __init__(self):
        self.calls = []

    def on_train_begin(self, logs):
        self.calls.append("begin")

    def on_epoch_end(self, epoch, logs):
        self.calls.append((epoch, logs["loss"], logs["val_loss"]))

    def on_train_end(self, logs):
        self.calls.append(("end", logs["loss"]))
"""
"""A class as in a cell of a notebook: no module has it, so that it cannot be sent to another process."""


def losses() -> Any:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, namespace)  # noqa: S102 - as a notebook does
    return namespace["Losses"]()


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"epoch": n, "loss": 1 / n, "val_loss": 2.0 / n, "auc": None} for n in range(1, 1 + count)
    ]


def arguments(bags: Path, folder: Path) -> dict[str, Any]:
    lines = ["slide,label", *(f"s{i},{'ab'[i % 2]}" for i in range(TARGET_BAGS))]
    (folder / "labels.csv").write_text("\n".join(lines))
    return {
        "mil": bags,
        "labels": folder / "labels.csv",
        "out": folder / "run",
        "resamples": 0,
        "progress": Progress(),
    }


def test_each_epoch_is_reported_once(tmp_path: Path) -> None:
    """Epoch 2 is trained again after a restart; the process died between writing and sending epoch 3, and after epoch 5."""
    callback, history = losses(), rows(5)
    observed = Observation([callback], tmp_path, resume=False)
    observed.begin()
    for row in (history[0], history[1], history[1], history[3]):
        write_dicts(tmp_path / HISTORY, history[: row["epoch"]])
        observed.epoch(row)
    write_dicts(tmp_path / HISTORY, history)
    observed.end()
    expected = [(row["epoch"] - 1, row["loss"], row["val_loss"]) for row in history]
    assert callback.calls == ["begin", *expected, ("end", history[-1]["loss"])]
    resumed = losses()
    observed = Observation([resumed], tmp_path, resume=True)
    write_dicts(tmp_path / HISTORY, rows(6))
    observed.epoch(rows(6)[5])
    assert resumed.calls == [(5, *list(rows(6)[5].values())[1:3])]


def test_callbacks_that_need_more_than_an_observer_are_refused(tmp_path: Path) -> None:
    class Batches:
        def on_train_batch_end(self, batch: int, logs: Any) -> None: ...

    class Stopping:
        model: Any

        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.model.stop_training = self.model.optimizer

    for wrong in (Batches(), object()):
        with pytest.raises(UsageError, match="in_process=True"):
            Observation([wrong], tmp_path, resume=False)
    with pytest.raises(UsageError, match="callbacks: found Stopping, expected Keras callbacks"):
        histopipe.train(out=tmp_path / "run", in_process=True, callbacks=[Stopping()])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError):
        histopipe.train(out=tmp_path / "file", resume=True, callbacks=[Stopping()])
    (tmp_path / HISTORY).write_text("epoch,loss\n1,abc\n")
    with pytest.raises(DamagedStore, match=r"history\.csv cannot be read"):
        Observation([Stopping()], tmp_path, resume=True)
    (tmp_path / HISTORY).unlink()
    observed = Observation([Stopping()], tmp_path, resume=False)
    with pytest.raises(UsageError, match=r"a callback uses self\.model\.optimizer"):
        observed.epoch(rows(1)[0])


@pytest.mark.long(reason="a training")
def test_training_in_its_own_process_is_observed(target_bags: Path, tmp_path: Path) -> None:
    callback = losses()
    histopipe.train(**arguments(target_bags, tmp_path), epochs=2, patience=0, callbacks=[callback])
    with (tmp_path / "run" / HISTORY).open() as file:
        history = [*csv.DictReader(file)]
    assert [call[0] for call in callback.calls] == ["b", 0, 1, "end"]
    for (_, loss, val_loss), row in zip(callback.calls[1:3], history, strict=True):
        assert (loss, val_loss) == pytest.approx(
            (float(row["loss"]), float(row["val_loss"])), rel=1e-4
        )


@pytest.mark.long(reason="a training")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
def test_keras_callbacks_have_the_model_in_this_process(
    target_bags: Path, tmp_path: Path, tensorflow: None
) -> None:
    import keras

    class Watcher(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.batches, self.rates, self.weights = list[int](), list[float](), list[float]()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches.append(batch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.weights.append(
                float(sum(abs(weights).sum() for weights in self.model.get_weights()))
            )
            self.rates.append(float(self.model.optimizer.learning_rate.numpy()))
            self.model.stop_training = epoch == 2

    watcher = Watcher()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (1 + epoch))
    settings = {**arguments(target_bags, tmp_path), "epochs": 9, "patience": 0, "batch_size": 8}
    result = histopipe.train(**settings, in_process=True, callbacks=[schedule, watcher])
    assert result.epochs == 3
    assert watcher.rates == pytest.approx([0.01, 0.005, 0.01 / 3])
    assert len(set(watcher.weights)) == 3
    steps = len(watcher.batches) // 3
    assert watcher.batches == [*range(steps)] * 3 and steps > 1
