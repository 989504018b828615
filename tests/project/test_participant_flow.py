"""The participant flow of a messy folder of slides, from the files to the evaluation."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from helpers.commands import run_command, succeed, with_tensorflow
from helpers.paths import GOLDEN
from helpers.scores import adds_up
from helpers.stores import flip_bytes
from helpers.trainings import csv_rows
from histopipe.inference.predict import predict
from histopipe.reports.report import report
from histopipe.splits.slide_table import (
    Exclusion,
    Flow,
    SlideEntry,
    flow_from_json,
    read_slide_table,
)
from histopipe.store.store import Store


def flow_in(path: Path) -> Flow:
    flow = flow_from_json(json.loads(path.read_text())["flow"])
    assert adds_up(flow), flow
    return flow


@pytest.mark.nightly(
    reason="two trainings; test_subgroups.py and test_external_validation_of_a_slide_model show the parts"
)
def test_flow_of_a_messy_folder(made: Path, tmp_path: Path) -> None:
    """Files that are no slides, a copy, missing labels, a quality filter, damaged patches, and a slide of only such."""
    folder, store, run = tmp_path / "slides", tmp_path / "s.lmdb", tmp_path / "run"
    slides = sorted(path for path in made.iterdir() if path.suffix == ".svs")
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns("labels.csv"))
    (folder / "text.svs").write_text("no slide")
    (folder / "cut.svs").write_bytes(slides[0].read_bytes()[:5000])
    shutil.copy(slides[2], folder / "copy.svs")
    labels = [
        f"{path.stem},{'nt'[i % 2]},p{i}" for i, path in enumerate(slides) if i not in (1, 11)
    ]
    table = tmp_path / "labels.csv"
    # The copy is of another patient, by mistake. Slide 11 has an empty label, slide 1 no row.
    table.write_text(
        "\n".join(["slide,label,patient", *labels, "copy,n,p99", f"{slides[11].stem},,p11"])
    )
    ingested = run_command("ingest", folder, "--out", store, "--patch-size", 128, "--labels", table)
    assert ingested.returncode == 3, ingested.stderr  # partly done
    succeed("quality", store)
    settings = (
        *("--model", "small-cnn", "--split-by", "patient", "--fractions", "0.4,0.3,0.3"),
        *("--min-tissue", 0.7, "--epochs", 1, "--resamples", 0, "--on-error", "skip"),
    )
    succeed("train", store, *settings, "--out", tmp_path / "first")
    tested = [slide for slide in read_slide_table(tmp_path / "first" / "slides.csv") if slide.test]
    with Store(store) as opened:
        planned = {record.id: record.planned for record in opened.slides}
        for slide, step in zip(tested, (1, 5), strict=False):  # all patches, and some of them
            (number,) = (n for n, record in opened.records.items() if record.id == slide.slide)
            flip_bytes(store, [(number, row) for row in range(0, planned[slide.slide], step)])
    succeed("train", store, *settings, "--splits", tmp_path / "first" / "splits.json", "--out", run)
    flow, participants = flow_in(run / "metrics.json"), read_slide_table(run / "slides.csv")
    assert flow["slides"].total == 15
    assert flow["slides"].excluded == {"ingest failed": 2, "no label": 2, "all patches damaged": 1}
    assert flow["patches"].total == sum(planned.values())
    assert flow["patches"].excluded[Exclusion.FILTERED] > 0
    copies = [{slide.slide, slide.copy_of} for slide in participants if slide.copy_of]
    assert copies == [{"copy", slides[2].stem}]
    check_evaluated(run, flow, participants)
    predict(run, store, out=tmp_path / "p", on_error="skip")
    external = flow_in(tmp_path / "p" / "evaluation.json")
    expected = {"ingest failed": 2, "no readable patch": 1, "no label": 2}
    assert external["slides"].excluded == expected
    evaluated = json.loads((tmp_path / "p" / "evaluation.json").read_text())["test"]
    assert evaluated["patch"]["count"] == external["patches"].used[("test",)]
    page = html.unescape(report(run, pictures=False).file.read_text())
    (chart,) = re.findall(r'<svg class="chart flow".*?</svg>', page, re.DOTALL)
    for text in ("2 slides: ingest failed", "1 slide: all patches damaged", "15 slides"):
        assert f">{text}<" in chart


def check_evaluated(run: Path, flow: Flow, participants: list[SlideEntry]) -> None:
    """Check that the flow counts what was evaluated."""
    predicted = csv_rows(run / "predictions.csv")
    patches = Counter(row["split"] for row in predicted)
    slides = Counter(side for side, _ in {(row["split"], row["slide"]) for row in predicted})
    for side in ("validation", "test"):
        used = flow["patches"].used[(side,)], flow["slides"].used[(side,)]
        assert used == (patches[side], slides[side])
        assert sum(getattr(slide, side) for slide in participants) == patches[side]
    tested = json.loads((run / "metrics.json").read_text())["test"]
    assert (tested["patch"]["count"], tested["slide"]["mean"]["count"]) == used


TWICE = """
import histopipe
from pathlib import Path
for rows in (5, 3):
    Path("labels.csv").write_text("\\n".join(LINES[:rows]))
    result = histopipe.predict("run", "slides", out="p", labels="labels.csv")
    print(result.metrics.slide["mean"].count)
"""


def test_removed_label_does_not_apply_any_more(tmp_path: Path) -> None:
    earlier = GOLDEN / "2026-11-25"
    shutil.copytree(earlier / "run", tmp_path / "run")
    (tmp_path / "slides").mkdir()
    for number in range(4):
        shutil.copy(GOLDEN / "slides" / f"slide-{number:03d}.svs", tmp_path / "slides")
    lines = (earlier / "labels.csv").read_text().splitlines()
    done = with_tensorflow(f"LINES = {lines}\n{TWICE}", cwd=tmp_path)
    assert done.stdout.split() == ["4", "2"], done.stderr
