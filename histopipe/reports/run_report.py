"""Report of a run: metrics with intervals, curves, slides, settings, and limitations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from histopipe.errors import DamagedStore, HistopipeError, NothingToDo, UsageError
from histopipe.evaluation import evaluate
from histopipe.reports import charts
from histopipe.reports.data_description import RunData, plain, read_run
from histopipe.reports.evaluation_blocks import EvaluatedPredictions, metric_cards
from histopipe.reports.evaluation_sections import add_analysis, add_metrics, target_table
from histopipe.reports.failures import certain_patches, decisions
from histopipe.reports.heatmap_values import SlideImages, open_values
from histopipe.reports.html_page import (
    Block,
    Cards,
    Cell,
    Charts,
    Column,
    Gallery,
    NameValueTable,
    Notes,
    Page,
    Picture,
    Row,
    Table,
    Text,
    heatmap_image,
    number,
)
from histopipe.reports.run_description import limitations, selection_rule
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig
from histopipe.splits.splits import FIRST_ALGORITHM
from histopipe.splits.subsets import SUBSETS, Subset

_MAX_HEATMAPS = 24


def slide_table(run: RunData) -> Table | None:
    """Return a table of all validation and test slides, or bags. Return None if there are none."""
    annotated = getattr(run.config, "labels_from", "slide") == "annotation"
    rows = [
        row for subset in run.predictions for row in _slide_rows(run.evaluated, subset, annotated)
    ]
    if not rows:
        return None
    if isinstance(run.config, BagTrainConfig):
        what, item, unit = "Bags", run.config.bag, "bags"
    else:
        what, item, unit = "Slides (mean over patches)", "slide", "patches"
    decided = [Column("label"), Column("decided"), Column("correct")]
    if annotated:  # most slides have several labels
        decided = [*(Column(name, True) for name in run.classes), Column("correct", True)]
    columns = (
        Column(item), Column("patient"), Column("split"), Column(unit, True), *decided,
        *(Column(f"p {name}", True) for name in run.classes),
    )  # fmt: skip
    return Table(f"{what}: labels and predictions", columns, rows)


def _slide_rows(evaluated: EvaluatedPredictions, subset: Subset, annotated: bool) -> Iterator[Row]:
    """Yield a row per slide. If its patches are `annotated`, it has their numbers and share of correct decisions."""
    for slide in decisions(evaluated, subset):
        if annotated:
            counts = [number(slide.counts.get(name, 0)) for name in evaluated.task.classes]
            decided = [*counts, number(100 * slide.right, unit=" %")]
        else:
            correct = Cell("no", tone="bad") if slide.wrong else Cell("yes", tone="good")
            several = len(slide.labels) > 1
            label = "several" if several else slide.labels[0]
            decided = [Cell(label), Cell(slide.decision), Cell("") if several else correct]
        yield Row([
            Cell(slide.name, tone="id"), Cell(slide.patient), Cell(subset), number(slide.patches), *decided,
            *(number(p, 3) for p in slide.probability),
        ])  # fmt: skip


def heatmaps(run: RunData) -> Gallery | None:
    """Return heatmaps of some validation and test slides, or None if there are none."""
    name = None
    if not isinstance(run.config, BagTrainConfig):
        positive = run.evaluated.task.positive
        name = run.classes[-1 if positive is None else positive]
    title = "Dark purple is 0, yellow is 1. Areas without colour are not in validation or test."
    return heatmap_gallery(run.folder, SlideImages({}, run.stores), title, name)


def heatmap_gallery(
    folder: Path, images: SlideImages, title: str, class_name: str | None = None
) -> Gallery | None:
    """Return heatmaps of some slides with values in a folder, or None if there are none."""
    made: list[Picture] = []
    try:
        slides, read_values = open_values(folder, images.stores, class_name)
    except HistopipeError:
        return None  # a slide model without attention
    for slide in slides:
        if len(made) == _MAX_HEATMAPS:
            break
        with suppress(NothingToDo, DamagedStore, UsageError):
            values = read_values(slide)
            if values is not None:
                image = heatmap_image(values, images.of(slide))
                made.append(Picture.of(f"heat-{len(made)}", f"{slide}: {values.name}", image))
    return Gallery(title, made) if made else None


def run_page(
    folder: Path, *, stores: Sequence[Path] = (), pictures: bool = True, follow: bool = True
) -> Page:
    """Return the page of a finished run. For the other arguments and the errors, see `read_run`."""
    with ExitStack() as stack:
        run = read_run(folder, stores, stack, follow=follow)
        subject = " vs. ".join(run.classes)
        evaluated = run.evaluated
        if not evaluated.task.of_classes:
            subject = f"{run.config.task} of {', '.join(run.config.target_columns)}"
        subtitle = f"{_network(run.config)}, {subject}, in {folder}"
        page = Page(f"Run {folder.resolve().name}", subtitle)
        page.add("Summary", *_summary(run))
        add_metrics(page, evaluated)
        page.add("Learning curves", _curves(run))
        page.add("Slides", slide_table(run) if evaluated.task.of_classes else target_table(run))
        if pictures:
            page.add("Patches", *certain_patches(evaluated, run.stores))
            page.add("Heatmaps", heatmaps(run))
        images = SlideImages({}, run.stores) if pictures else None
        add_analysis(page, evaluated, run.slides, images)
        page.add("Splits", *_splits(run))
        page.add("Configuration", _configuration(run))
        page.add("Environment", _environment(run))
        page.add("Limitations", Notes(list(_limitations(run))))
    return page


def _summary(run: RunData) -> Iterator[Block]:
    subset, evaluation = run.evaluated.main
    name = "Test set" if subset == "test" else "Validation set (there is no test set)"
    yield Text(f"{name}. Brackets show 95 % confidence intervals, with patients as units.", "soft")
    yield Cards(metric_cards(run.evaluated))
    result = run.result
    if subset in result.covariates_only:
        finest = result.covariates_only[subset].finest
        name, title = next(iter(run.evaluated.task.main.items()))
        yield Text(
            f"A model of the covariates alone ({', '.join(getattr(run.config, 'covariates', ()))}): {title} "
            f"{evaluate.with_interval(finest, name)}. The difference is what the slides add."
        )
    yield Text(
        f"Model after epoch {result.best_epoch} of {result.epochs}, which has the "
        f"{selection_rule(run)} on validation. "
        f"Training took {result.seconds:,.0f} s."
    )
    shortcut = result.breakdown.shortcut
    if shortcut is not None and shortcut.warning:
        yield Text(f"Warning: {shortcut}", "bad")
    yield from (
        Text(f"Warning: {name.lower()}, {remark}.", "bad")
        for remark in evaluate.remarks(evaluation)
    )
    if run.splits.get("split_by") == "patch":
        yield Text(
            "Split by patch: test patches are neighbours of training patches. Metrics are not valid for new slides.",
            "bad",
        )


def _curves(run: RunData) -> Charts | None:
    history = run.history
    if not history:
        return None
    epochs = [row.get("epoch") or 0.0 for row in history]
    best = float(run.result.best_epoch)

    def curve(name: str, column: str) -> charts.Line:
        return name, epochs, [row.get(column) for row in history]

    made = [
        charts.lines("Loss", [curve("training", "loss"), curve("validation", "val_loss")], x="epoch", y="loss", mark=best),
    ]  # fmt: skip
    name, title = next(iter(run.evaluated.task.main.items()))
    pair = [curve("training", name), curve("validation", f"val_{name}")]
    made.append(charts.lines(title, pair, x="epoch", y=title, mark=best))
    rate = curve("learning rate", "learning_rate")
    if len(set(rate[2])) > 1:
        made.append(charts.lines("Learning rate", [rate], x="epoch", y="rate"))
    return Charts(made)


def _splits(run: RunData) -> Iterator[Block]:
    splits = run.splits
    unit = run.config.unit
    labels_from = getattr(run.config, "labels_from", None)
    labels_from = ", patch classes from annotations" if labels_from == "annotation" else ""
    how = f"by {splits.get('split_by')}"
    if splits.get("column") is not None:
        how = f"from column {splits['column']}"
    yield Text(
        f"Split {how}, algorithm {splits.get('algorithm', FIRST_ALGORITHM)}, seed {splits.get('seed')}{labels_from}. "
        "Written before training."
    )
    counts = splits.get("counts", {})
    yield Table(
        f"{unit.capitalize()} by split and class",
        (Column("split"), *(Column(name, True) for name in run.classes)),
        [Row([Cell(subset), *(number(counts.get(subset, {}).get(c, 0)) for c in run.classes)]) for subset in SUBSETS],
    )  # fmt: skip
    sites = Counter(
        (str(slide.get("site") or "no site"), str(slide.get("label")))
        for slide in splits.get("slides", [])
    )
    names = sorted({site for site, _ in sites})
    if len(names) > 1:
        yield Table(
            f"{_samples(run)} by site and label. If a site has only one label, the model can learn the site instead.",
            (Column("site"), *(Column(name, True) for name in run.classes)),
            [Row([Cell(s), *(number(sites[s, c]) for c in run.classes)]) for s in names],
        )  # fmt: skip


def _network(config: TrainConfig) -> str:
    if isinstance(config, PatchTrainConfig):
        return config.model
    return f"bags, {config.pooling}" if isinstance(config, BagTrainConfig) else "bags"


def _configuration(run: RunData) -> NameValueTable:
    values = run.config.values().items()
    facts = [(name, plain(value)) for name, value in values if value is not None]
    return NameValueTable("All settings, as in config.toml", facts, open=False)


def _environment(run: RunData) -> NameValueTable:
    facts = run.metrics_file
    versions = ("histopipe", "tensorflow", "keras")
    rows = [(name, str(facts[name])) for name in versions if name in facts]
    rows += [(name, plain(value)) for name, value in facts.get("environment", {}).items()]
    rows += [
        ("devices", f"{facts.get('replicas', 1)} ({run.config.devices})"),
        ("patches per device at a time", str(facts.get("micro_batch", ""))),
        ("precision", run.config.precision), ("deterministic", str(run.config.deterministic)),
        ("peak host memory", f"{run.result.host_bytes / 1e9:,.2f} GB"),
        ("peak GPU memory", "no GPU" if run.result.gpu_bytes is None else f"{run.result.gpu_bytes / 1e9:,.2f} GB"),
    ]  # fmt: skip
    return NameValueTable("Environment of the training", rows, open=True)


def _limitations(run: RunData) -> Iterator[str]:
    yield from (f"{text}." for text in limitations(run))
    skipped = run.metrics_file.get("skipped")
    if skipped:
        yield f"{skipped} damaged {run.config.unit} were left out."
    if run.result.gpu_bytes is None:
        yield "GPU memory was not measured: no GPU was used."
    yield from run.missing


def _samples(run: RunData) -> str:
    """Return what the entries of the split are."""
    return "Patients" if getattr(run.config, "bag", "slide") == "patient" else "Slides"
