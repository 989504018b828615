"""Progress of a training's process is shown by its caller."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock, call

import pytest

from histopipe.runs.supervision import _Attempt
from histopipe.system.output import (
    Bar,
    ReportedProgress,
    default_progress,
    message,
    show_progress,
    use_progress,
)
from histopipe.system.tensorflow import load_quietly


@contextmanager
def relayed(display: MagicMock) -> Iterator[dict[int, Bar]]:
    """Send progress as messages within the block, as between two processes. Yield the open bars."""
    bars: dict[int, Bar] = {}

    def report(name: str, value: Any) -> None:
        assert name == "progress"
        show_progress(display, bars, value)

    with use_progress(ReportedProgress(report)):
        yield bars


def test_caller_shows_bars_and_messages_of_a_training() -> None:
    display = MagicMock()
    with relayed(display):
        message("train 3 n")
        with default_progress().bar("epoch 1/2", unit="steps", total=9, done=4) as bar:
            bar.advance()
            bar.retitle("epoch")
            bar.update(9, 9)
    assert display.mock_calls == [
        call.message(text="train 3 n"),
        call.bar(title="epoch 1/2", unit="steps", total=9, done=4),
        call.bar().update(done=5, total=None, left=ANY),
        call.bar().retitle(title="epoch"),
        call.bar().update(done=9, total=9, left=None),
        call.bar().close(),
    ]


def test_bars_of_an_ended_process_are_closed() -> None:
    bars = [MagicMock(), MagicMock()]
    with relayed(MagicMock(**{"bar.side_effect": bars})) as opened:
        for title in ("epoch", "validation"):
            default_progress().bar(title, unit="steps")
    _Attempt.close(MagicMock(_bars=opened))
    for bar in bars:
        bar.close.assert_called_once()


def test_bar_updates_are_throttled() -> None:
    sent: list[Any] = []
    bar = ReportedProgress(lambda _, value: sent.append(value)).bar("epoch", unit="steps")
    for _ in range(10_000):
        bar.advance()
    assert len(sent) < 100


def test_default_progress_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    display = MagicMock()
    with pytest.raises(KeyError), use_progress(display):
        message("inside")
        raise KeyError
    message("outside")
    assert display.mock_calls == [call.message("inside")]
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
