"""Report of a run: metrics with intervals, curves, slides, settings, and limitations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from histopipe.errors import DamagedStore, HistopipeError, NothingToDo, UsageError
from histopipe.evaluation import evaluate
from histopipe.reports import charts
from histopipe.reports.data_description import RunData, read_run
from histopipe.reports.evaluation_blocks import INTERVALS, metric_cards, shortcut_warning
from histopipe.reports.evaluation_sections import add_analysis, add_metrics, slide_table
from histopipe.reports.failures import confident_patches
from histopipe.reports.heatmap_values import SlideImages, open_values
from histopipe.reports.html_page import (
    Block,
    Cell,
    Page,
    Picture,
    Row,
    Table,
    heatmap_image,
    number,
    values_block,
)
from histopipe.reports.run_description import limitations, selection_rule
from histopipe.runs.task_config import BagTrainConfig
from histopipe.splits.splits import FIRST_ALGORITHM
from histopipe.splits.subsets import SUBSETS

_MAX_HEATMAPS = 24


def heatmap_gallery(
    folder: Path, images: SlideImages, title: str, class_name: str | None = None
) -> Block | None:
    """Return heatmaps of some slides with values in a folder, or None if there are none."""
    made: list[Picture] = []
    try:
        slides, read_values = open_values(folder, images.stores, class_name)
    except HistopipeError:
        return None  # a slide model without attention
    for slide in slides:
        with suppress(NothingToDo, DamagedStore, UsageError):
            values = read_values(slide)
            if values is not None:
                image = heatmap_image(values, images.of(slide))
                made.append(Picture.of(f"heat-{len(made)}", f"{slide}: {values.name}", image))
        if len(made) == _MAX_HEATMAPS:
            break
    return Block("gallery", made, title) if made else None


def run_page(
    folder: Path, *, stores: Sequence[Path] = (), pictures: bool = True, follow: bool = True
) -> Page:
    """Return the page of a finished run. For the other arguments and the errors, see `read_run`."""
    with ExitStack() as stack:
        run = read_run(folder, stores, stack, follow=follow)
        evaluated, config, positive = run.evaluated, run.config, run.evaluated.task.positive
        on_bags = isinstance(config, BagTrainConfig)
        values = config.values()
        network = f"bags, {values['pooling']}" if on_bags else values["model"]
        subject = f"{config.task} of {', '.join(config.target_columns)}"
        if evaluated.task.of_classes:
            subject = " vs. ".join(run.classes)
        page = Page(f"Run {folder.resolve().name}", f"{network}, {subject}, in {folder}")
        page.add("Summary", *_summary(run))
        add_metrics(page, evaluated)
        page.add("Learning curves", _learning_curves(run))
        page.add("Slides", slide_table(run))
        images = SlideImages({}, run.stores) if pictures else None
        if images is not None:
            page.add("Patches", *confident_patches(evaluated, run.stores))
            title = (
                "Dark purple is 0, yellow is 1. Areas without colour are not in validation or test."
            )
            name = None if on_bags else run.classes[-1 if positive is None else positive]
            page.add("Heatmaps", heatmap_gallery(folder, images, title, name))
        add_analysis(page, evaluated, run.slides, images)
        page.add("Splits", *_splits(run))
        page.add("Configuration", values_block("All settings, as in config.toml", values))
        page.add("Environment", _environment(run))
        page.add("Limitations", Block("notes", list(_limitations(run))))
    return page


def _summary(run: RunData) -> Iterator[Block]:
    subset, evaluation = run.evaluated.main
    name = "Test set" if subset == "test" else "Validation set (there is no test set)"
    yield Block("text", f"{name}. {INTERVALS}", tone="soft")
    yield Block("cards", metric_cards(run.evaluated))
    result = run.result
    if subset in result.covariates_only:
        metric, title = next(iter(run.evaluated.task.main.items()))
        yield Block(
            "text",
            f"A model of the covariates alone ({', '.join(getattr(run.config, 'covariates', ()))}): {title} "
            f"{evaluate.with_interval(result.covariates_only[subset].finest, metric)}. "
            "The difference is what the slides add.",
        )
    yield Block(
        "text",
        f"Model after epoch {result.best_epoch} of {result.epochs}, which has {selection_rule(run)}. "
        f"Training took {result.seconds:,.0f} s.",
    )
    yield from shortcut_warning(run.evaluated)
    for remark in evaluate.remarks(evaluation):
        yield Block("text", f"Warning: {name.lower()}, {remark}.", tone="bad")
    if run.splits.get("split_by") == "patch":
        yield Block(
            "text",
            "Split by patch: test patches are neighbours of training patches. Metrics are not valid for new slides.",
            tone="bad",
        )


def _learning_curves(run: RunData) -> Block | None:
    history = run.history
    if not history:
        return None
    epochs = [row.get("epoch") or 0.0 for row in history]
    best = float(run.result.best_epoch)

    def curve(name: str, column: str) -> charts.Line:
        return name, epochs, [row.get(column) for row in history]

    made = []
    metric, metric_title = next(iter(run.evaluated.task.main.items()))
    for title, column, y in (("Loss", "loss", "loss"), (metric_title, metric, metric_title)):
        pair = [curve("training", column), curve("validation", f"val_{column}")]
        made.append(charts.lines(title, pair, x="epoch", y=y, mark=best))
    rate = curve("learning rate", "learning_rate")
    if len(set(rate[2])) > 1:
        made.append(charts.lines("Learning rate", [rate], x="epoch", y="rate"))
    return Block("charts", made)


def _splits(run: RunData) -> Iterator[Block | Table]:
    splits, classes = run.splits, run.classes
    column = splits.get("column")
    how = f"by {splits.get('split_by')}" if column is None else f"from column {column}"
    annotated = getattr(run.config, "labels_from", None) == "annotation"
    yield Block(
        "text",
        f"Split {how}, algorithm {splits.get('algorithm', FIRST_ALGORITHM)}, seed {splits.get('seed')}"
        f"{', patch classes from annotations' if annotated else ''}. Written before training.",
    )
    counts = splits.get("counts", {})
    yield Table(
        f"{run.config.unit.capitalize()} by split and class",
        ("split", *classes),
        [
            Row([Cell(subset), *(number(counts.get(subset, {}).get(c, 0)) for c in classes)])
            for subset in SUBSETS
        ],
    )
    sites = Counter(
        (str(slide.get("site") or "no site"), str(slide.get("label")))
        for slide in splits.get("slides", [])
    )
    names = sorted({site for site, _ in sites})
    if len(names) > 1:
        items = "Patients" if getattr(run.config, "bag", "slide") == "patient" else "Slides"
        yield Table(
            f"{items} by site and label. If a site has only one label, the model can learn the site instead.",
            ("site", *classes),
            [Row([Cell(s), *(number(sites[s, c]) for c in classes)]) for s in names],
        )


def _environment(run: RunData) -> Block:
    metrics, gpu_bytes = run.metrics_file, run.result.gpu_bytes
    values = {
        **{name: metrics.get(name) for name in ("histopipe", "tensorflow", "keras")},
        **metrics.get("environment", {}),
        "devices": f"{metrics.get('replicas', 1)} ({run.config.devices})",
        "patches per device at a time": metrics.get("micro_batch", ""),
        "precision": run.config.precision,
        "deterministic": run.config.deterministic,
        "peak host memory": f"{run.result.host_bytes / 1e9:,.2f} GB",
        "peak GPU memory": "no GPU" if gpu_bytes is None else f"{gpu_bytes / 1e9:,.2f} GB",
    }
    return values_block("Environment of the training", values, is_open=True)


def _limitations(run: RunData) -> Iterator[str]:
    yield from limitations(run)
    skipped = run.metrics_file.get("skipped")
    if skipped:
        yield f"{skipped} damaged {run.config.unit} were left out."
    if run.result.gpu_bytes is None:
        yield "GPU memory was not measured: no GPU was used."
    yield from run.missing
