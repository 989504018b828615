"""The report of a run: what was trained on what, how good it is and how sure that is, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from histopipe.dataset.options import SIDES, Side
from histopipe.evaluation.evaluate import Evaluation, positive_class
from histopipe.evaluation.metrics import Bin, Metrics
from histopipe.evaluation.roc import roc_of
from histopipe.evaluation.scores import Level, scores_of
from histopipe.evaluation.table import WITH_INTERVALS
from histopipe.reports import charts
from histopipe.reports.page import (
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
from histopipe.reports.run_facts import RunFacts, read_run
from histopipe.reports.run_pictures import heatmaps, telling_patches
from histopipe.reports.run_slides import slide_table
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig

_FIGURES = (
    ("auc", "AUC"), ("balanced_accuracy", "balanced accuracy"), ("accuracy", "accuracy"),
    ("sensitivity", "sensitivity"), ("specificity", "specificity"), ("f1", "F1"),
    ("brier", "Brier score"), ("log_loss", "log loss"), ("calibration_error", "calibration error"),
)  # fmt: skip
_LEVELS: tuple[tuple[Level, str], ...] = (("patch", "patches"), ("slide", "slides"), ("patient", "patients"))  # fmt: skip
_NAMES: dict[str, str] = dict(_LEVELS)


def run_page(
    folder: Path, *, stores: Sequence[Path] = (), pictures: bool = True, follow: bool = True
) -> Page:
    """The page of a finished run.

    Args:
        folder: the run's.
        stores: where its stores are, if not where they were.
        pictures: of patches and slides.
        follow: open the stores that the run names.

    Raises:
        UsageError: there is no finished run.
        DamagedStore: it cannot be read.
    """
    with ExitStack() as stack:
        run = read_run(folder, stores, stack, follow=follow)
        what = _network(run.config)
        page = Page(
            f"Run {folder.resolve().name}", f"{what}, {' against '.join(run.classes)}, in {folder}"
        )
        page.add("Summary", *_summary(run))
        page.add("Figures", *_figures(run))
        page.add("Curves", _curves(run))
        page.add("ROC and calibration", _roc_and_calibration(run))
        page.add("Confusion", *_confusions(run))
        page.add("Slides", slide_table(run))
        if pictures:
            page.add("Patches", *telling_patches(run))
            page.add("Heatmaps", heatmaps(run))
        page.add("Splits", *_splits(run))
        page.add("Configuration", _configuration(run))
        page.add("Environment", _environment(run))
        page.add("Not measured", Notes(list(_not_measured(run))))
    return page


def _judged(run: RunFacts) -> tuple[Side, Evaluation]:
    """The side that says most: test, where there is one."""
    side: Side = "test" if "test" in run.result.metrics else "validation"
    return side, run.result.metrics[side]


def _summary(run: RunFacts) -> Iterator[Block]:
    side, evaluation = _judged(run)
    held = "test" if side == "test" else "validation: no test set"
    cards = [
        Card(f"{name} of {_NAMES[level.partition('_')[0]]}", _figure(getattr(metrics, figure)), _interval(metrics, figure))
        for level, metrics in _shown(evaluation)
        for figure, name in WITH_INTERVALS.items()
    ]  # fmt: skip
    yield Text(f"On {held}; in brackets 95 % intervals from resampling patients.", "soft")
    yield Cards(cards)
    result = run.result
    yield Text(
        f"The model is that of epoch {result.best_epoch} of {result.epochs}, chosen by validation AUC. "
        f"Training took {result.seconds:,.0f} s."
    )
    if run.splits.get("split_by") == "patch":
        yield Text("Split by patch: neighbours of training patches were tested, so these figures say nothing of other slides.", "bad")  # fmt: skip


def _shown(evaluation: Evaluation) -> Iterator[tuple[str, Metrics]]:
    """Patches, then slides and patients by their mean; patients who are slides only once."""
    slide = evaluation.slide.get("mean")
    for name, metrics in evaluation.named():
        if name == "patch" or (name.endswith("_mean") and not (name.startswith("patient") and metrics == slide)):  # fmt: skip
            yield name, metrics


def _figures(run: RunFacts) -> Iterator[Block]:
    columns = (Column("side"), Column("of"), Column("n", True), *(Column(name, True) for _, name in _FIGURES), Column("threshold", True), Column("notes"))  # fmt: skip
    rows = [
        Row([
            Cell(side), Cell(level.replace("_", ", ")), number(metrics.count),
            *(_with_interval(metrics, figure) for figure, _ in _FIGURES), number(metrics.threshold, 3),
            Cell("; ".join(metrics.notes), tone="why"),
        ])
        for side, evaluation in run.result.metrics.items()
        for level, metrics in evaluation.named()
    ]  # fmt: skip
    yield Table("Figures of validation and test, at every level", columns, rows)


def _curves(run: RunFacts) -> Charts | None:
    history = run.history
    if not history:
        return None
    epochs = [row.get("epoch") or 0.0 for row in history]
    best = float(run.result.best_epoch)

    def curve(name: str, column: str) -> charts.Line:
        return name, epochs, [row.get(column) for row in history]

    made = [
        charts.lines("Loss", [curve("training", "loss"), curve("validation", "val_loss")], x="epoch", y="loss", mark=best),
        charts.lines("AUC", [curve("training", "auc"), curve("validation", "val_auc")], x="epoch", y="AUC", mark=best),
    ]  # fmt: skip
    rate = curve("learning rate", "learning_rate")
    if len(set(rate[2])) > 1:
        made.append(charts.lines("Learning rate", [rate], x="epoch", y="rate"))
    return Charts(made)


def _roc_and_calibration(run: RunFacts) -> Charts:
    found: dict[str, Sequence[Bin]] = {
        side: evaluation.finest.reliability for side, evaluation in run.result.metrics.items()
    }
    return Charts([*_roc_charts(run), charts.calibration_chart("Calibration", found)])


def _roc_charts(run: RunFacts) -> Iterator[str]:
    """A chart a level: of two classes the positive one's curve on each side; of more, each class on the side that says most."""
    positive = positive_class(run.classes, run.judging.positive)
    for level, title in _LEVELS:
        curves = {}
        sides = list(run.predictions) if positive is not None else [_judged(run)[0]]
        for side in sides:
            patches = run.predictions[side]
            if _rank(level) < _rank(patches.level):
                continue
            scores = scores_of(
                patches, level, "mean", top_k=run.judging.top_k, positive=positive or 0
            )
            for i, name in enumerate(run.classes):
                if positive not in (None, i) or not len(scores.label):
                    continue
                roc = roc_of(scores, i, patients=len(patches.patients), seed=run.judging.seed)
                if roc is not None:
                    curves[side if positive is not None else name] = roc
        if curves:
            yield charts.roc_chart(f"ROC of {title}", curves)


def _rank(level: Level) -> int:
    return [name for name, _ in _LEVELS].index(level)


def _confusions(run: RunFacts) -> Iterator[Block]:
    side, evaluation = _judged(run)
    for level, metrics in _shown(evaluation):
        rows = [(name, metrics.confusion[i]) for i, name in enumerate(run.classes)]
        threshold = "" if metrics.threshold is None else f", from {metrics.threshold:.3f} on"
        yield Confusion(f"{level.replace('_', ', ')} of {side}{threshold}", run.classes, rows)


def _splits(run: RunFacts) -> Iterator[Block]:
    splits = run.splits
    unit = run.config.unit
    by_annotation = (
        isinstance(run.config, PatchTrainConfig) and run.config.labels_from == "annotation"
    )
    labels_from = ", classes as drawn on patches" if by_annotation else ""
    yield Text(f"Split by {splits.get('split_by')}, seed {splits.get('seed')}{labels_from}. Written before training.")  # fmt: skip
    counts = splits.get("counts", {})
    yield Table(
        f"{unit} by side and class",
        (Column("side"), *(Column(name, True) for name in run.classes)),
        [Row([Cell(side), *(number(counts.get(side, {}).get(c, 0)) for c in run.classes)]) for side in SIDES],
    )  # fmt: skip
    sites: dict[tuple[str, str], int] = {}
    for slide in splits.get("slides", []):
        key = str(slide.get("site") or "no site"), str(slide.get("label"))
        sites[key] = sites.get(key, 0) + 1
    if len({site for site, _ in sites}) > 1:
        names = sorted({site for site, _ in sites})
        yield Table(
            "slides by site and label: a site with one label only lets a model learn the site",
            (Column("site"), *(Column(name, True) for name in run.classes)),
            [Row([Cell(s), *(number(sites.get((s, c), 0)) for c in run.classes)]) for s in names],
        )  # fmt: skip


def _network(config: TrainConfig) -> str:
    if isinstance(config, PatchTrainConfig):
        return config.model
    return f"bags, {config.pooling}" if isinstance(config, BagTrainConfig) else "bags"


def _configuration(run: RunFacts) -> Facts:
    values = run.config.values().items()
    facts = [(name, _text(value)) for name, value in values if value is not None]
    return Facts("Every setting, as config.toml has it", facts, open=False)


def _environment(run: RunFacts) -> Facts:
    facts = run.facts
    told = [
        (name, str(facts[name])) for name in ("histopipe", "tensorflow", "keras") if name in facts
    ]
    told += [(name, _text(value)) for name, value in facts.get("environment", {}).items()]
    told += [
        ("devices", f"{facts.get('replicas', 1)} ({run.config.devices})"),
        ("patches of a device at once", str(facts.get("micro_batch", ""))),
        ("precision", run.config.precision), ("deterministic", str(run.config.deterministic)),
        ("most memory of the host", f"{run.result.host_bytes / 1e9:,.2f} GB"),
        ("most memory of GPUs", "no GPU" if run.result.gpu_bytes is None else f"{run.result.gpu_bytes / 1e9:,.2f} GB"),
    ]  # fmt: skip
    return Facts("Where it was trained", told, open=True)


def _not_measured(run: RunFacts) -> Iterator[str]:
    if "test" not in run.result.metrics:
        yield "Nothing was held out for a test: the figures are of the patches that the model was chosen by."
    notes = {
        note
        for evaluation in run.result.metrics.values()
        for _, m in evaluation.named()
        for note in m.notes
    }
    yield from (f"{note[0].upper()}{note[1:]}." for note in sorted(notes))
    skipped = run.facts.get("skipped")
    if skipped:
        yield f"{skipped} damaged {run.config.unit} were left out."
    yield "How good the model is on slides of another hospital, scanner or stain: only slides of this data set were seen."
    yield "How much the figures change with another split or seed: this is one run. `histopipe train --folds 5` tells."
    yield "Calibration has no interval."
    if run.result.gpu_bytes is None:
        yield "Memory of a GPU: none was used."
    yield from run.missing


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _interval(metrics: Metrics, figure: str) -> str:
    if figure not in metrics.intervals:
        return "no interval"
    low, high = metrics.intervals[figure]
    return f"[{low:.3f}, {high:.3f}]"


def _with_interval(metrics: Metrics, figure: str) -> Cell:
    value = getattr(metrics, figure)
    if value is None:
        return Cell("", tone="n")
    interval = f" {_interval(metrics, figure)}" if figure in metrics.intervals else ""
    return Cell(f"{value:.3f}{interval}", float(value), "n")


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
