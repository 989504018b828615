"""Progress of a training's process is shown by its caller."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from histopipe.runs.supervision import _Attempt
from histopipe.system.output import (
    Bar,
    Progress,
    ReportedProgress,
    default_progress,
    message,
    show_progress,
    use_progress,
)
from histopipe.system.tensorflow import load_quietly


class Recorded(Progress):
    """A progress that records its events."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def bar(self, title: str, **options: Any) -> Bar:
        self.events.append(("bar", title, options))
        return RecordedBar(self.events, title)

    def message(self, text: str) -> None:
        self.events.append(("message", text))


class RecordedBar(Bar):
    def __init__(self, events: list[tuple[Any, ...]], title: str) -> None:
        self._events, self._title = events, title

    def update(self, done: int, total: int | None = None, left: float | None = None) -> None:
        self._events.append(("update", self._title, done, total))

    def retitle(self, title: str) -> None:
        self._events.append(("retitle", self._title, title))

    def close(self) -> None:
        self._events.append(("close", self._title))


@contextmanager
def relayed(recorded: Recorded) -> Iterator[dict[int, Bar]]:
    """Send progress as messages within the block, as between two processes. Yield the open bars."""
    bars: dict[int, Bar] = {}

    def report(name: str, value: Any) -> None:
        assert name == "progress"
        show_progress(recorded, bars, value)

    with use_progress(ReportedProgress(report)):
        yield bars


def test_caller_shows_bars_and_messages_of_a_training() -> None:
    recorded = Recorded()
    with relayed(recorded):
        message("train 3 n")
        with default_progress().bar("epoch 1/2", unit="steps", total=9, done=4) as bar:
            bar.advance()
            bar.retitle("epoch")
            bar.update(9, 9)
    assert recorded.events == [
        ("message", "train 3 n"),
        ("bar", "epoch 1/2", {"unit": "steps", "total": 9, "done": 4}),
        ("update", "epoch 1/2", 5, None),
        ("retitle", "epoch 1/2", "epoch"),
        ("update", "epoch 1/2", 9, 9),
        ("close", "epoch 1/2"),
    ]


def test_bars_of_an_ended_process_are_closed() -> None:
    recorded = Recorded()
    with relayed(recorded) as bars:
        for title in ("epoch", "validation"):
            default_progress().bar(title, unit="steps")
    _Attempt.close(MagicMock(_bars=bars))
    assert sorted(event for event in recorded.events if event[0] == "close") == [
        ("close", "epoch"),
        ("close", "validation"),
    ]


def test_bar_updates_are_throttled() -> None:
    sent: list[Any] = []
    bar = ReportedProgress(lambda _, value: sent.append(value)).bar("epoch", unit="steps")
    for _ in range(10_000):
        bar.advance()
    assert len(sent) < 100


def test_default_progress_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Recorded()
    with pytest.raises(KeyError), use_progress(recorded):
        message("inside")
        raise KeyError
    message("outside")
    assert recorded.events == [("message", "inside")]
    assert capsys.readouterr().err == "outside\n"


def test_packages_hidden_from_keras_can_be_imported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "optional_package.py").write_text("VALUE = 3\n")
    (tmp_path / "loads_lean.py").write_text(
        "try:\n    import optional_package\nexcept ImportError:\n    optional_package = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("histopipe.system.tensorflow._OPTIONAL", ("optional_package",))
    assert load_quietly("loads_lean", lean=True).optional_package is None
    assert importlib.import_module("optional_package").VALUE == 3
