"""Report of a run: metrics with intervals, curves, slides, settings, and limitations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from histopipe.dataset.options import SIDES, Side
from histopipe.evaluation import table
from histopipe.evaluation.calibration import Bin
from histopipe.evaluation.evaluate import AnyMetrics, Evaluation, positive_class
from histopipe.evaluation.levels import Level
from histopipe.evaluation.metrics import Metrics
from histopipe.evaluation.predictions import scores_of
from histopipe.evaluation.statistics import roc_of
from histopipe.reports import charts
from histopipe.reports.html_page import (
    Block,
    Card,
    Cards,
    Cell,
    Charts,
    Column,
    Confusion,
    Facts,
    Notes,
    Page,
    Row,
    Table,
    Text,
    number,
)
from histopipe.reports.run_data import RunData, read_run
from histopipe.reports.run_slides import certain_patches, heatmaps, slide_table
from histopipe.reports.run_targets import target_charts, target_metrics, target_table
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig

_FIGURES = (
    ("auc", "AUC"), ("balanced_accuracy", "balanced accuracy"), ("accuracy", "accuracy"),
    ("sensitivity", "sensitivity"), ("specificity", "specificity"), ("f1", "F1"),
    ("brier", "Brier score"), ("log_loss", "log loss"), ("calibration_error", "calibration error"),
)  # fmt: skip
_LEVELS: tuple[tuple[Level, str], ...] = (
    ("patch", "patches"),
    ("slide", "slides"),
    ("patient", "patients"),
)
_NAMES: dict[str, str] = dict(_LEVELS)


def run_page(
    folder: Path, *, stores: Sequence[Path] = (), pictures: bool = True, follow: bool = True
) -> Page:
    """Return the page of a finished run. For the other arguments and the errors, see `read_run`."""
    with ExitStack() as stack:
        run = read_run(folder, stores, stack, follow=follow)
        subject = " vs. ".join(run.classes)
        if run.targets:
            subject = f"{run.config.task} of {', '.join(run.config.target_columns)}"
        subtitle = f"{_network(run.config)}, {subject}, in {folder}"
        page = Page(f"Run {folder.resolve().name}", subtitle)
        page.add("Summary", *_summary(run))
        page.add("Metrics", *(target_metrics(run) if run.targets else _metrics(run)))
        page.add("Curves", _curves(run))
        if run.targets:
            page.add("Predictions", *target_charts(run))
            page.add("Slides", target_table(run))
        else:
            page.add("ROC and calibration", _roc_and_calibration(run))
            page.add("Confusion", *_confusions(run))
            page.add("Slides", slide_table(run))
        if pictures:
            page.add("Patches", *certain_patches(run))
            page.add("Heatmaps", heatmaps(run))
        page.add("Splits", *_splits(run))
        page.add("Configuration", _configuration(run))
        page.add("Environment", _environment(run))
        page.add("Limitations", Notes(list(_limitations(run))))
    return page


def _main_evaluation(run: RunData) -> tuple[Side, Evaluation]:
    """Return the test set if there is one, else the validation set."""
    side: Side = "test" if "test" in run.result.metrics else "validation"
    return side, run.result.metrics[side]


def _summary(run: RunData) -> Iterator[Block]:
    side, evaluation = _main_evaluation(run)
    name = "Test set" if side == "test" else "Validation set (there is no test set)"
    cards = []
    for level, metrics in _shown(evaluation):
        for figure, title in table.shown_figures(run.config.task)[0].items():
            value = table.number(metrics.figures[figure])
            interval = table.interval(metrics, figure) or "no interval"
            cards.append(Card(f"{title}, {_NAMES[level.partition('_')[0]]}", value, interval))
    yield Text(f"{name}. Brackets show 95 % confidence intervals from resampling patients.", "soft")
    yield Cards(cards)
    result = run.result
    if side in result.covariates_only:
        finest = result.covariates_only[side].finest
        name, title = next(iter(table.shown_figures(run.config.task)[0].items()))
        yield Text(
            f"A model of the covariates alone ({', '.join(getattr(run.config, 'covariates', ()))}): {title} "
            f"{table.with_interval(finest, name)}. The difference is what the slides add."
        )
    yield Text(
        f"Model after epoch {result.best_epoch} of {result.epochs}, selected by validation "
        f"{table.main_figure(evaluation.finest)[0]}. "
        f"Training took {result.seconds:,.0f} s."
    )
    if run.splits.get("split_by") == "patch":
        yield Text(
            "Split by patch: test patches are neighbours of training patches. Metrics are not valid for new slides.",
            "bad",
        )


def _shown(evaluation: Evaluation) -> Iterator[tuple[str, AnyMetrics]]:
    """Yield metrics of patches, and of means per slide and patient. Patients are left out if equal to slides."""
    same = table.same_as_slides(evaluation, "mean")
    for name, metrics in evaluation.named():
        if name in ("patch", "slide_mean") or (name == "patient_mean" and not same):
            yield name, metrics


def _metrics(run: RunData) -> Iterator[Block]:
    columns = (
        Column("split"),
        Column("level"),
        Column("n", True),
        *(Column(name, True) for _, name in _FIGURES),
        Column("threshold", True),
        Column("notes"),
    )
    rows = [
        Row([
            Cell(side), Cell(level.replace("_", ", ")), number(metrics.count),
            *(_with_interval(metrics, figure) for figure, _ in _FIGURES), number(metrics.threshold, 3),
            Cell("; ".join(metrics.notes), tone="why"),
        ])
        for side, evaluation in run.result.metrics.items()
        for level, metrics in evaluation.named()
        if isinstance(metrics, Metrics)
    ]  # fmt: skip
    yield Table("Metrics of the validation and test sets at all levels", columns, rows)


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
    name, title = next(iter(table.shown_figures(run.config.task)[0].items()))
    pair = [curve("training", name), curve("validation", f"val_{name}")]
    made.append(charts.lines(title, pair, x="epoch", y=title, mark=best))
    rate = curve("learning rate", "learning_rate")
    if len(set(rate[2])) > 1:
        made.append(charts.lines("Learning rate", [rate], x="epoch", y="rate"))
    return Charts(made)


def _roc_and_calibration(run: RunData) -> Charts:
    judged = run.result.metrics.items()
    finest = {side: it.finest for side, it in judged}
    found: dict[str, Sequence[Bin]] = {
        side: it.reliability for side, it in finest.items() if isinstance(it, Metrics)
    }
    return Charts([*_roc_charts(run), charts.calibration_chart("Calibration", found)])


def _roc_charts(run: RunData) -> Iterator[str]:
    """Yield one chart per level: one curve per split for two classes, else one curve per class on the main split."""
    judging = run.config.judging
    positive = positive_class(run.classes, judging.positive)
    ranks = {level: rank for rank, (level, _) in enumerate(_LEVELS)}
    for level, title in _LEVELS:
        curves = {}
        sides = list(run.predictions) if positive is not None else [_main_evaluation(run)[0]]
        for side in sides:
            patches = run.predictions[side]
            if ranks[level] < ranks[patches.level]:
                continue
            scores = scores_of(patches, level, "mean", top_k=judging.top_k, positive=positive or 0)
            for i, name in enumerate(run.classes):
                if positive not in (None, i) or not len(scores.label):
                    continue
                roc = roc_of(scores, i, patients=len(patches.patients), seed=judging.seed)
                if roc is not None:
                    curves[side if positive is not None else name] = roc
        if curves:
            yield charts.roc_chart(f"ROC, {title}", curves)


def _confusions(run: RunData) -> Iterator[Block]:
    side, evaluation = _main_evaluation(run)
    for level, metrics in _shown(evaluation):
        if not isinstance(metrics, Metrics):
            continue
        rows = [(name, metrics.confusion[i]) for i, name in enumerate(run.classes)]
        threshold = "" if metrics.threshold is None else f", threshold {metrics.threshold:.3f}"
        yield Confusion(f"{side}: {level.replace('_', ', ')}{threshold}", run.classes, rows)


def _splits(run: RunData) -> Iterator[Block]:
    splits = run.splits
    unit = run.config.unit
    labels_from = getattr(run.config, "labels_from", None)
    labels_from = ", patch classes from annotations" if labels_from == "annotation" else ""
    yield Text(
        f"Split by {splits.get('split_by')}, seed {splits.get('seed')}{labels_from}. "
        "Written before training."
    )
    counts = splits.get("counts", {})
    yield Table(
        f"{unit.capitalize()} by split and class",
        (Column("split"), *(Column(name, True) for name in run.classes)),
        [Row([Cell(side), *(number(counts.get(side, {}).get(c, 0)) for c in run.classes)]) for side in SIDES],
    )  # fmt: skip
    sites = Counter(
        (str(slide.get("site") or "no site"), str(slide.get("label")))
        for slide in splits.get("slides", [])
    )
    names = sorted({site for site, _ in sites})
    if len(names) > 1:
        yield Table(
            "Slides by site and label. If a site has only one label, the model can learn the site instead.",
            (Column("site"), *(Column(name, True) for name in run.classes)),
            [Row([Cell(s), *(number(sites[s, c]) for c in run.classes)]) for s in names],
        )  # fmt: skip


def _network(config: TrainConfig) -> str:
    if isinstance(config, PatchTrainConfig):
        return config.model
    return f"bags, {config.pooling}" if isinstance(config, BagTrainConfig) else "bags"


def _configuration(run: RunData) -> Facts:
    values = run.config.values().items()
    facts = [(name, _text(value)) for name, value in values if value is not None]
    return Facts("All settings, as in config.toml", facts, open=False)


def _environment(run: RunData) -> Facts:
    facts = run.metrics_file
    versions = ("histopipe", "tensorflow", "keras")
    rows = [(name, str(facts[name])) for name in versions if name in facts]
    rows += [(name, _text(value)) for name, value in facts.get("environment", {}).items()]
    rows += [
        ("devices", f"{facts.get('replicas', 1)} ({run.config.devices})"),
        ("patches per device at a time", str(facts.get("micro_batch", ""))),
        ("precision", run.config.precision), ("deterministic", str(run.config.deterministic)),
        ("peak host memory", f"{run.result.host_bytes / 1e9:,.2f} GB"),
        ("peak GPU memory", "no GPU" if run.result.gpu_bytes is None else f"{run.result.gpu_bytes / 1e9:,.2f} GB"),
    ]  # fmt: skip
    return Facts("Environment of the training", rows, open=True)


def _limitations(run: RunData) -> Iterator[str]:
    if "test" not in run.result.metrics:
        unit = run.config.unit
        yield f"There is no test set. The metrics are of the validation {unit}, which were used to select the model."
    judged = (it for evaluation in run.result.metrics.values() for it in evaluation.named())
    notes = {note for _, metrics in judged for note in metrics.notes}
    yield from (f"{note[0].upper()}{note[1:]}." for note in sorted(notes))
    skipped = run.metrics_file.get("skipped")
    if skipped:
        yield f"{skipped} damaged {run.config.unit} were left out."
    yield "Performance on slides from another hospital, scanner or stain is unknown: only this data set was used."
    yield "Variation between splits and seeds is unknown: this is one run. Use --folds 5 to measure it."
    yield "The calibration has no confidence intervals."
    if run.result.gpu_bytes is None:
        yield "GPU memory was not measured: no GPU was used."
    yield from run.missing


def _with_interval(metrics: Metrics, figure: str) -> Cell:
    value = getattr(metrics, figure)
    return number(None) if value is None else Cell(table.with_interval(metrics, figure), value, "n")


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
