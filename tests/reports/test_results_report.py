"""Numbers in the reports of runs, predictions, cross-validations and comparisons equal those in the files."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from defusedxml import ElementTree

import histopipe
from helpers.commands import succeed
from helpers.runs import without_training
from helpers.trainings import csv_rows
from histopipe.errors import DamagedStore, UsageError
from histopipe.predicting.predict import predict
from histopipe.reports.report import EMPTY, make_statements, report
from histopipe.reports.run_description import describe_run
from histopipe.runs.run import Run

SECTIONS = ("metrics", "subgroups", "failure-analysis", "participant-flow")
CELL = re.compile(r'data-v="([^"]+)">([^<]*)<')


def numbers_in(value: Any) -> Iterator[float]:
    """Yield all numbers of a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def numbers_of_slides(*tables: Path) -> Iterator[float]:
    """Yield probabilities and positions of patches; number of patches and mean probability of each slide."""
    slides = defaultdict[str, list[dict[str, str]]](list)
    for table in tables:
        for row in csv_rows(table):
            slides[row["slide"]].append(row)
    for rows in slides.values():
        yield len(rows)
        for name in (column for column in rows[0] if column.startswith("p_")):
            values = [np.float32(row[name]) for row in rows]
            yield from map(float, values)
            yield float(np.mean(values, dtype=np.float64))
        yield from (float(row[name]) for row in rows for name in ("x_l0", "y_l0"))


def check_page(page: Path, *files: Path, tables: Sequence[Path] = ()) -> str:
    """Check that each number in the tables of the evaluation is in one of the files. Return the text of the page.

    `tables` are the predictions of patches.
    """
    text = page.read_text(encoding="utf-8")
    numbers = [number for file in files for number in numbers_in(json.loads(file.read_text()))]
    numbers += numbers_of_slides(*tables)
    rounded = {round(number, 6) for number in numbers}
    formatted = {f"{number:.3f}" for number in numbers} | {f"{number:+.3f}" for number in numbers}
    count = 0
    for section in re.findall(r'<section id="([^"]+)">(.*?)</section>', text, re.DOTALL):
        for value, cell in CELL.findall(section[1]) if section[0] in SECTIONS else ():
            assert round(float(value), 6) in rounded, f"{section[0]}: {cell}"
            for end in re.findall(r"[-+]?\d+\.\d{3}", cell):
                assert end in formatted, f"{section[0]}: {cell}"
            count += 1
    assert count > 20
    return html.unescape(text)


def test_numbers_of_a_run(trained: Path, tmp_path: Path) -> None:
    page = report(trained, out=tmp_path / "run.html", pictures=False).file
    text = check_page(page, trained / "metrics.json", tables=[trained / "predictions.csv"])
    assert "data:image/webp" not in text
    flow = json.loads((trained / "metrics.json").read_text())["flow"]
    for part in (
        "Decision curve, patches",
        "Precision and recall, patches",
        "Metrics before and after",
        "All settings, as in config.toml",
        "Environment of the training",
        f"{flow['patches']['found']:,} patches",
    ):
        assert part in text
    predicted = Counter(row["split"] for row in csv_rows(trained / "predictions.csv"))
    for side in ("validation", "test"):
        assert flow["patches"]["used"][side] == predicted[side]


@pytest.mark.usefixtures("numpy_networks")
def test_numbers_of_predictions(
    trained: Path, made: Path, made_store: Path, tmp_path: Path
) -> None:
    head, *lines = (made / "labels.csv").read_text().splitlines()
    out, table = tmp_path / "p", tmp_path / "labels.csv"
    rows = [f"{line},{'ab'[i % 2]}" for i, line in enumerate(lines)]
    table.write_text("\n".join([f"{head},scanner", *rows]))
    predict(trained, made_store, out=out, labels=table, subgroup=["scanner"])
    patches = sorted((out / "patches").glob("*.csv"))
    text = check_page(report(out).file, out / "evaluation.json", tables=patches)
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert "scanner" in {subgroup["column"] for subgroup in evaluation["breakdown"]["subgroups"]}
    assert evaluation["flow"]["slides"]["used"] == {"test": 12}
    assert "Performance by subgroup" in text
    with pytest.raises(UsageError, match="--subgroup: found stage, but no --labels"):
        predict(trained, made_store, out=out, subgroup=["stage"])
    table.write_text("\n".join([head, lines[0]]))
    # Removed labels do not apply any more.
    predict(trained, made_store, out=out, labels=table)
    assert not (out / "evaluation.json").exists()
    assert "No labels are known" in report(out).file.read_text()


def test_numbers_of_folds_and_comparisons(small_store: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "cv1", tmp_path / "cv2"]
    with without_training():
        for run, rate in zip(runs, (1e-3, 1e-2), strict=True):
            settings: dict[str, Any] = {"folds": 2, "epochs": 1, "learning_rate": rate}
            histopipe.cross_validate(small_store, out=run, resamples=50, seed=1, **settings)
    tables = [runs[0] / "predictions.csv"]
    text = check_page(report(runs[0]).file, runs[0] / "summary.json", tables=tables)
    assert "Test set of each fold" in text
    text = report(runs, out=tmp_path / "both.html").file.read_text()
    assert "Settings that differ" in text and "learning_rate" in text
    with pytest.raises(UsageError, match="--out is missing"):
        report(runs)


CLAIM_FOR_AUTHORS = {"2", "3", "4", "5", "6", "11", "15", "17", "18", "21", "33", "34", "41", "44"}
STARD_FOR_AUTHORS = {
    *("1", "2", "3", "4", "5", "6", "8", "10", "15d", "16b", "17a", "17b", "19", "22"),
    *("26a", "26b", "27", "29", "32", "34", "35", "36", "37", "38", "39", "40b"),
}
TRIPOD_FOR_AUTHORS = {
    "2",
    "3a",
    "3b",
    "3c",
    "4",
    "5b",
    "6c",
    "8c",
    "9c",
    "10",
    "16",
    "17",
    "18a",
    "18b",
    "18c",
    "18d",
    "18e",
    "19",
    "20c",
    "25",
    "27b",
    "27c",
}


@pytest.mark.parametrize(
    ("name", "count", "authors"),
    [
        ("claim", 44, CLAIM_FOR_AUTHORS),
        ("tripod-ai", 52, TRIPOD_FOR_AUTHORS),
        ("stard-ai", 48, STARD_FOR_AUTHORS),
    ],
)
def test_checklist_holds_only_what_the_run_knows(
    trained: Path, tmp_path: Path, name: str, count: int, authors: set[str]
) -> None:
    """Items such as ethics stay empty. Numbers from metrics.json are in that file."""
    text = report(trained, checklist=name, out=tmp_path / "c.md").file.read_text(encoding="utf-8")
    items = re.findall(r"^\*\*(\w+)\*\* .*? \*([a-z ]+)\*\n\n((?:- .*\n)+)", text, re.MULTILINE)
    assert len(items) == count
    assert authors <= {number for number, status, _ in items if status == "for the authors"}
    for number, status, answer in items:
        assert (EMPTY in answer) == (status != "filled from the run"), number
        assert (answer == f"- {EMPTY}\n") == (status == "for the authors"), number
    metrics = numbers_in(json.loads((trained / "metrics.json").read_text()))
    quoted = [line for line in re.findall(r"- (.*) \[metrics.json\]", text) if "µm" not in line]
    decimals = re.findall(r"(?<![\d.])\d+\.\d{3}(?![\d.])", "\n".join(quoted))
    assert len(decimals) >= 4
    assert set(decimals) <= {f"{value:.3f}" for value in metrics}
    check_counts(text, trained)
    assert "histopipe" in text.partition("## Methods")[2]
    assert text.count("@article{") >= 4


@pytest.mark.parametrize(
    ("part", "changes", "name", "text"),
    [
        ("patches", {"trained": {"head": 0}}, "network", "only its last layer was trained."),
        ("patches", {"trained": {"last": 3}}, "network", "its last 3 blocks were trained."),
        ("patches", {"trained": {"lora": 4}}, "network", "updates of rank 4 were trained."),
        ("patches", {"bounds": ["a", "b"]}, "patch_selection", "Patches with a and b were used."),
        ("patches", {"stain_norm": "macenko"}, "preprocessing", "by the method macenko."),
        ("patches", {"augmentations": []}, "augmentation", "Patches were not augmented."),
        ("threshold", {"fixed": "0.4"}, "threshold", "was set to 0.4 in advance."),
        ("threshold", {"of": "sensitivity", "least": "0.9"}, "threshold", "of at least 0.9 on the"),
        ("tiling", {"moved": True, "overlap": 3}, "tiling", "an overlap of 3 pixels; the last"),
        ("tiling", {"without_tissue": True}, "tiling", "Tissue was not detected"),
        ("encoding", {"lossless": True}, "encoding", "Patches were stored without loss."),
        ("split", {"column": "set", "balanced": True}, "split", "divided the data. Validation was"),
        ("split", {"region_um": 250.0, "disjoint": None}, "split_level", "Squares of 250 µm of a"),
        ("split", {"of_patches": True}, "split_level", "patches in several parts."),
        ("split", {"crossing": ["1 site"]}, "split_level", "In more than one part: 1 site."),
        ("model", {"weights": "imagenet"}, "weights", "from the weights imagenet."),
        ("model", {"covariates": ["age"]}, "inputs", ", and the covariates age."),
        ("training", {"weight_decay": 0.0}, "training", "schedule, weight decay 0) in batches"),
        ("training", {"balance": "slide"}, "imbalance", "each slide was drawn equally often."),
    ],
)
def test_statements_of_other_settings(
    trained: Path, part: str, changes: dict[str, Any], name: str, text: str
) -> None:
    """A template has a sentence for each value; the other tests need a run for each of them."""
    description = describe_run(Run(trained))
    description[part] |= changes
    assert text in make_statements(description)[name][0]


def check_counts(text: str, run: Path) -> None:
    """Check that the counts in a checklist are those of metrics.json, splits.json and slides.csv."""
    expected = []
    for level, counts in json.loads((run / "metrics.json").read_text())["flow"].items():
        excluded = sum(counts["excluded"].values())
        expected.append(f"Of {counts['found']:,} {level} found, {excluded:,} were excluded, and")
        expected += [f"{count:,} are in {side}" for side, count in counts["used"].items()]
    for side, counts in json.loads((run / "splits.json").read_text())["counts"].items():
        classes = " and ".join(f"{count:,} {name}" for name, count in counts.items())
        expected.append(f"{side} {classes}")
    rows = csv_rows(run / "slides.csv")
    for side in ("train", "validation", "test"):
        patients = {(row["patient"], row["label"]) for row in rows if row["status"] == side}
        labels = sorted(Counter(label for _, label in patients).items())
        expected.append(f"{side} {' and '.join(f'{count} {label}' for label, count in labels)}")
    for part in expected:
        assert re.sub(r"\btrain\b", "training", part) in text


def test_checklist_files_agree(trained: Path, tmp_path: Path) -> None:
    markdown, page = (
        report(trained, checklist="claim", out=tmp_path / name).file.read_text(encoding="utf-8")
        for name in ("c.md", "c.html")
    )
    assert len(re.findall(r"<td[^>]*>\d+</td>", page)) == 44
    answers = re.findall(r"- (.* \[[\w., -]+\])\n", markdown)
    assert answers and all(answer in html.unescape(page) for answer in answers)
    for name, checklist, message in (
        ("c.docx", "claim", r"--out: .*c\.docx, expected .* \.html or \.md; for Word, .*pandoc"),
        ("c.md", "stard", r"checklist: found 'stard', expected .* or 'claim' or 'stard-ai'"),
    ):
        with pytest.raises(UsageError, match=message):
            report(trained, checklist=checklist, out=tmp_path / name)


def test_completed_model_card_is_kept(trained: Path, made_store: Path, tmp_path: Path) -> None:
    """The run is copied without its store, whose pictures are in the second report."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    card, config = run / "model-card.md", run / "config.toml"
    card.unlink(missing_ok=True)
    config.write_text(config.read_text().replace(str(made_store), str(tmp_path / "gone.lmdb")))
    first = report(run)
    assert (first.model_card, first.card_kept) == (card, False)
    page = first.file.read_text(encoding="utf-8")
    assert "No pictures of patches and slides: no store at" in page and "data:image" not in page
    text = card.read_text(encoding="utf-8")
    for part in (
        *("## Data", "## Metrics", "## Subgroups", "## Limits", "## Licence and contact"),
        f"## Intended use\n\n- For the author: {EMPTY}",
        hashlib.sha256((run / "model.keras").read_bytes()).hexdigest(),
    ):
        assert part in text
    card.write_text("completed", encoding="utf-8")
    assert "model-card.md  (not changed)" in succeed("report", run, "--store", made_store)
    assert "data:image/webp" in first.file.read_text(encoding="utf-8")
    assert card.read_text(encoding="utf-8") == "completed"


def test_participant_flow_is_a_picture(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "flow.svg"
    figure = report(trained, out=out).file.read_text(encoding="utf-8")
    assert ElementTree.fromstring(figure).tag == "{http://www.w3.org/2000/svg}svg"
    assert ">Labelled<" in figure and "var(" not in figure
    with pytest.raises(UsageError, match=r"--out: found .*r\.pdf, expected a file ending in \.htm"):
        report(trained, out=tmp_path / "r.pdf")
    with pytest.raises(UsageError, match="has no participant flow"):
        report(tmp_path, out=out)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(DamagedStore, match=r"summary\.json is damaged"):
        report(tmp_path, out=out)
