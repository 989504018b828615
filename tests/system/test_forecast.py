"""The work and the time that are left, and the stage that limits a run."""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from histopipe.system.forecast import Outlook, Stages, bottleneck, shares_of, spelled
from histopipe.system.output import BarProgress, LineProgress


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2.0 min"),
        (3000, "50 min"),
        (7200, "2.0 h"),
        (2e5, "2.3 days"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert spelled(seconds) == text


def test_outlook_from_bytes_leaves_out_what_says_nothing() -> None:
    outlook = Outlook({"a": 100, "b": 300, "done": 5000, "failed": 1000})
    totals = [outlook.total]
    for change, *arguments in (
        (outlook.left_out, "done"),
        (outlook.planned, "a", 10),  # of 100 bytes
        (outlook.planned, "a", 10),  # again
        (outlook.left_out, "failed"),
        (outlook.planned, "b", 50),
        (outlook.lost, 20),
    ):
        change(*arguments)
        totals.append(outlook.total)
    assert totals == [0, 0, 140, 140, 40, 60, 40]


@pytest.mark.parametrize(
    ("slides", "seconds", "left"),
    # A patch takes 1 s, and a slide 5 s more: when it begins. Slides of one batch share their time.
    [("ab", [15, 10, 10], [35, 30]), ("abc", [2], [2, 2])],
)
def test_seconds_are_those_of_patches_and_of_slides(
    monkeypatch: pytest.MonkeyPatch, slides: str, seconds: list[int], left: list[float]
) -> None:
    now = 100.0
    monkeypatch.setattr("histopipe.system.forecast.time.monotonic", lambda: now)
    outlook = Outlook(dict.fromkeys([*slides, "last"], 10 * len(seconds)))
    for name in slides:
        outlook.planned(name, 10 * len(seconds))
        for batch, duration in enumerate(seconds):
            now += duration
            outlook.done += 10
            outlook.advanced(name, steady=batch > 0)
    assert [outlook.seconds_left(count) for count in (1, 0)] == pytest.approx(left)


def test_seconds_without_work_are_unknown() -> None:
    outlook = Outlook({"a": 1, "b": 1})
    outlook.spent(2.0, 0, 1)  # of a plan: no patch is known to take time
    outlook.planned("a", 5000)
    assert outlook.seconds_left() is None
    assert Outlook({"a": 1}).seconds_left(1) is None


def test_stages_of_threads() -> None:
    stages = Stages()

    def work() -> None:
        with stages.reading("tiling"):
            time.sleep(0.05)
            sum(range(300_000))
        with stages.of("writing"):
            time.sleep(0.02)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(work) for _ in range(2)]:
            future.result()
    assert stages.seconds["tiling"] >= 0.1 and stages.seconds["writing"] >= 0.04
    assert stages.seconds["decoding"] > 0
    divided = stages.divided(10.0)
    assert sum(divided.values()) == pytest.approx(10.0)
    assert divided["tiling"] > divided["writing"]
    assert Stages().divided(10.0) == {}


def test_bottleneck_is_the_largest_share() -> None:
    shares = shares_of({"disk": 1.0, "the device": 2.99, "writing": 0.01})
    assert list(shares) == ["the device", "disk", "writing"] and sum(shares.values()) == 1
    assert bottleneck(shares) == "limited by the device: 75% of the time (disk 25%)"
    assert bottleneck({"disk": 1.0}) == "limited by disk: 100% of the time"


def test_lines_and_bars_show_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("histopipe.system.output.time.monotonic", lambda: now)
    stream = io.StringIO()
    with LineProgress(stream).bar("embedding", unit="patches", total=1000) as bar:
        for second, done, total, left in (
            (100.0, 100, None, None),  # starting up
            (140.0, 300, None, None),
            (180.0, 400, 2000, 7200.0),
        ):
            now = second
            bar.update(done, total, left)
    assert stream.getvalue().splitlines() == [
        "embedding: 100 patches, 0/s",
        "embedding: 300/1,000 patches, 5/s, about 2.3 min left",
        "embedding: 400/2,000 patches, 4/s, about 2.0 h left",
    ]
    monkeypatch.undo()
    with BarProgress(stream).bar("embedding", unit="patches", total=1000) as bar:
        bar.update(100, 2000, 7200.0)
        time.sleep(0.2)  # it is drawn ten times per second
        bar.update(200, 2000, 7200.0)
    assert "200/2000" in stream.getvalue() and "about 2.0 h left" in stream.getvalue()
