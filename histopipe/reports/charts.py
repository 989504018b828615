"""Charts and the figure of the participant flow as SVG elements, in the light or dark colours of the page."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from histopipe.evaluation.label_errors import LearningCurve
from histopipe.reports.html_page import TEMPLATES
from histopipe.splits.slide_table import CHOSEN, LABELLED, READ, SELECTED, Flow, subsets_text
from histopipe.system.files import atomic_write, write_atomically
from histopipe.system.output import counted
from histopipe.tasks.curves import DecisionCurve, Reliability, RiskGroup
from histopipe.tasks.intervals import FEWEST_PATIENTS
from histopipe.tasks.statistics import Roc

_INK, _LINE = "#1c2430", "#d5dae1"
"""Colours of the text and of the grid lines, on a light page."""
_SERIES = ("#0072b2", "#d55e00", "#00835e", "#a8528a")
_VARIABLES = {
    _INK: "var(--ink)",
    _LINE: "var(--line)",
    **{colour: f"var(--c{i})" for i, colour in enumerate(_SERIES, 1)},
}
"""CSS variables that replace the colours in an SVG element: a dark page has others."""

_SHARES = (-0.02, 1.02)
"""Limits of an axis of values from 0 to 1."""
_POINTS = 2000
"""Most points of a chart."""


def lines(
    title: str,
    xs: Sequence[float],
    curves: Mapping[str, Sequence[float | None]],
    *,
    x: str,
    y: str,
    mark: float | None = None,
) -> str:
    """Draw the y values of curves, by name, over the x values `xs`. `mark` is an x value to mark with a vertical line."""
    with _chart(title) as axes:
        for name, ys in curves.items():
            values = np.array(ys, np.float64)  # NaN for None
            axes.plot(xs, values, linewidth=1.6, label=name, marker="o", markersize=2.5)
        if mark is not None:
            axes.axvline(mark, color=_INK, linewidth=0.8, linestyle=":")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(axes, ", ".join(curves), legend="best", xlabel=x, ylabel=y)


def histogram(
    title: str, values: NDArray[np.floating], *, x: str, y: str = "patches", share: bool = False
) -> str:
    """Draw a histogram."""
    with _chart(title) as axes:
        bins = 20 if share else min(30, max(5, len(np.unique(values))))
        axes.hist(values, bins, range=(0, 1) if share else None)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(
            axes,
            f"{len(values)} values from {values.min():g} to {values.max():g}",
            xlabel=x,
            ylabel=y,
        )


def roc_chart(title: str, curves: Mapping[str, Roc]) -> str:
    """Draw ROC curves with their confidence bands."""
    with _chart(title, square=True) as axes:
        _draw_roc(axes, curves)
        return _svg(axes, ", ".join(curves))


def _draw_roc(axes: Axes, curves: Mapping[str, Roc]) -> None:
    _draw_diagonal(axes)
    for name, roc in curves.items():
        (line,) = axes.plot(
            roc.false_positive, roc.true_positive, linewidth=1.6, label=_legend_label(name, roc)
        )
        for rates in roc.folds:
            axes.plot(*rates, color=line.get_color(), linewidth=0.5, alpha=0.5, linestyle="-")
        if roc.band is not None:
            axes.fill_between(*roc.band, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="1 - specificity", ylabel="sensitivity", xlim=_SHARES, ylim=_SHARES)
    axes.legend(loc="lower right")


def _legend_label(name: str, roc: Roc) -> str:
    """Return a label that a legend shows: it hides names that begin with an underscore."""
    folds = f", mean of {len(roc.folds)} folds" if roc.folds else ""
    return f" {name}{folds}" if name.startswith("_") else name + folds


def precision_chart(title: str, curves: Mapping[str, Roc]) -> str:
    """Draw precision-recall curves as steps."""
    with _chart(title, square=True) as axes:
        for name, roc in curves.items():
            axes.step(
                roc.recall,
                # No precision is defined where no item is decided positive: the first one is shown.
                np.append(roc.precision[0], roc.precision),
                where="pre",
                linewidth=1.6,
                label=_legend_label(name, roc),
            )
        return _svg(
            axes,
            ", ".join(curves),
            legend="lower left",
            xlabel="recall (sensitivity)",
            ylabel="precision (PPV)",
            xlim=_SHARES,
            ylim=_SHARES,
        )


def decision_chart(title: str, curve: DecisionCurve) -> str:
    """Draw the net benefit of the model, of treating all, and of treating none."""
    with _chart(title, square=True) as axes:
        for name, values in (("model", curve.model), ("treat all", curve.treat_all)):
            axes.plot(curve.probability, values, linewidth=1.6, label=name)
        axes.axhline(0, color=_INK, linewidth=0.8, linestyle=":", label="treat none")
        highest = max(*curve.model, *curve.treat_all, 0.01)
        return _svg(
            axes,
            "model, treat all, treat none",
            legend="best",
            xlabel="threshold probability",
            ylabel="net benefit",
            ylim=(-highest / 2, highest * 1.1),
        )


def _draw_diagonal(axes: Axes, ends: Sequence[float] = (0, 1)) -> None:
    axes.plot(ends, ends, color=mpl.rcParams["grid.color"], linewidth=0.8, linestyle="--")


def calibration_chart(title: str, curves: Mapping[str, Reliability]) -> str:
    """Draw a reliability diagram: observed frequency with intervals against predicted probability, and smooth curves."""
    with _chart(title, square=True) as axes:
        _draw_diagonal(axes)
        for name, (bins, smooth) in curves.items():
            points = [
                (
                    bin_.probability,
                    bin_.observed,
                    bin_.count,
                    *(bin_.interval or [bin_.observed] * 2),
                )
                for bin_ in bins
                if bin_.probability is not None and bin_.observed is not None
            ]
            xs, ys, counts, lows, highs = np.reshape(points, (-1, 5)).T
            (line,) = axes.plot(*(smooth if len(smooth[0]) else (xs, ys)), linewidth=1, label=name)
            axes.scatter(xs, ys, s=6 + 60 * counts / max(counts, default=1), color=line.get_color())
            axes.vlines(xs, lows, highs, color=line.get_color(), linewidth=0.8)
        return _svg(
            axes,
            ", ".join(curves),
            legend="upper left",
            xlabel="predicted probability",
            ylabel="observed frequency",
            xlim=_SHARES,
            ylim=_SHARES,
        )


def survival_chart(title: str, groups: Sequence[RiskGroup]) -> str:
    """Draw Kaplan-Meier curves with their confidence bands; groups with too few patients have none."""
    with _chart(title) as axes:
        for group in groups:
            name = f"{group.name} ({group.count} patients, {group.events} events)"
            (line,) = axes.step(
                group.times, group.survival, where="post", linewidth=1.6, label=name
            )
            if group.count >= FEWEST_PATIENTS:
                axes.fill_between(
                    group.times,
                    group.low,
                    group.high,
                    step="post",
                    color=line.get_color(),
                    alpha=0.15,
                    linewidth=0,
                )
        return _svg(
            axes,
            ", ".join(group.name for group in groups),
            legend="best",
            xlabel="time",
            ylabel="share of patients without event",
            ylim=_SHARES,
        )


def scatter_chart(title: str, true: NDArray[np.floating], predicted: NDArray[np.floating]) -> str:
    """Draw predicted against true values, with the line of equality."""
    with _chart(title, square=True) as axes:
        both = np.concatenate([true, predicted])
        _draw_diagonal(axes, [float(both.min()), float(both.max())] if len(both) else (0, 1))
        chosen = np.linspace(0, len(true) - 1, min(len(true), _POINTS)).astype(int)
        axes.plot(
            true[chosen], predicted[chosen], linestyle="", marker="o", markersize=3, alpha=0.6
        )
        return _svg(axes, "predicted against true values", xlabel="true", ylabel="predicted")


def interval_chart(
    title: str,
    series: Mapping[str, Mapping[str, tuple[float | None, tuple[float, float] | None]]],
    *,
    y: str,
) -> str:
    """Draw values with their intervals over the names of columns, side by side for each series."""
    columns = list(next(iter(series.values())))
    with _chart(title) as axes:
        for number, (name, values) in enumerate(series.items()):
            places = np.arange(len(columns)) + (number - (len(series) - 1) / 2) * 0.7 / len(series)
            middle = np.array([values[column][0] for column in columns], np.float64)
            ends = np.array([values[column][1] or (np.nan, np.nan) for column in columns])
            reach = np.nan_to_num(np.abs(ends.T - middle))
            axes.errorbar(
                places, middle, reach, linestyle="", marker="o", markersize=3.5, label=name
            )
        axes.set_xticks(range(len(columns)), columns, rotation=35, ha="right")
        axes.margins(y=0.3)  # room for the legend
        return _svg(axes, f"{', '.join(series)}: {', '.join(columns)}", legend="best", ylabel=y)


def learning_chart(curve: LearningCurve) -> str:
    """Draw a metric by number of training patients: measured with intervals, and the fitted power law with its band."""
    with _chart("Learning curve") as axes:
        measured, fitted = (
            np.array([(p.patients, p.value, *(p.interval or [None] * 2)) for p in points], float).T
            for points in (curve.points, curve.fitted)
        )
        reach = np.nan_to_num(np.abs(measured[2:] - measured[1]))
        axes.errorbar(measured[0], measured[1], reach, linestyle="", marker="o", label="measured")
        if curve.fitted:
            (line,) = axes.plot(*fitted[:2], label="power law")
            axes.fill_between(
                fitted[0], *fitted[2:], color=line.get_color(), alpha=0.15, linewidth=0
            )
        axes.set_xscale("log")
        sizes = [point.patients for point in (*curve.points, *curve.fitted[-1:])]
        axes.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
        axes.minorticks_off()
        return _svg(
            axes,
            "; ".join(curve.lines),
            legend="best",
            xlabel="training patients, without those of validation",
            ylabel=curve.title,
        )


def risk_chart(curve: Sequence[tuple[float, float]]) -> str:
    """Draw the share of wrong decisions among the most confident ones, by their share (risk-coverage curve)."""
    with _chart("Risk and coverage") as axes:
        shares, risks = np.array(curve).T
        axes.plot(shares, risks, drawstyle="steps-pre")
        return _svg(
            axes,
            f"{risks[-1]:.3f} of all decisions are wrong",
            xlabel="share decided",
            ylabel="share wrong",
            xlim=(0, 1),
            ylim=(0, None),
        )


@contextmanager
def _chart(title: str, *, square: bool = False) -> Iterator[Axes]:
    """Yield the axes of a new figure in the style of the page."""
    style: Any = {
        # All colours with the first line style, then with the next one.
        "axes.prop_cycle": cycler(linestyle=("-", "--", ":", "-.")) * cycler(color=_SERIES),
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.edgecolor": _LINE,
        "axes.labelcolor": _INK,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.grid": True,
        "grid.color": _LINE,
        "grid.linewidth": 0.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.axisbelow": True,
        "text.parse_math": False,
    }
    # Not the settings of a user's `matplotlibrc`.
    with matplotlib.style.context(style, after_reset=True):
        axes = Figure(figsize=(3.4, 3.4) if square else (4.2, 3.0), layout="constrained").subplots()
        axes.set_title(title, fontsize=10, loc="left")
        yield axes


def write_roc_png(path: Path, title: str, curves: Mapping[str, Roc]) -> None:
    """Write ROC curves as a PNG file, in the colours of a light page."""
    with _chart(title, square=True) as axes, atomic_write(path) as part:
        _draw_roc(axes, curves)
        cast(Figure, axes.figure).savefig(
            part, dpi=120, format="png", facecolor="white", metadata={"Software": None}
        )


def _svg(
    axes: Axes,
    description: str,
    *,
    legend: Literal["best", "lower left", "upper left"] | None = None,
    **settings: Any,
) -> str:
    """Return a figure as an SVG element. Its label has the title, and the description.

    `settings` are those of the axes, `legend` is the place of the legend.
    """
    axes.set(**settings)
    if legend is not None:
        axes.legend(loc=legend)
    buffer = io.StringIO()
    figure = cast(Figure, axes.figure)
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=metadata)
    text = buffer.getvalue()
    # Unused ids are removed, because other charts of the page have the same ids.
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px system-ui, sans-serif", text)
    width, height = figure.get_size_inches() * 72
    label = html.escape(f"{axes.get_title('left')}: {description}")
    head = f'<svg class="chart" role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}"'
    # A function, because a backslash of a title would be an escape in a text. The head also replaces the XML declaration.
    return re.sub(r"^.*?<svg[^>]*?(?= xmlns)", lambda _: head, text, count=1, flags=re.DOTALL)


_CHARACTER, _ROW, _PAD = 6.6, 17, 10
"""Width of a character, height of a line, and padding of a box, in pixels."""
_GAP = 34
_NOUNS = {"slides": "slide", "patients": "patient", "patches": "patch"}
_LIGHT_VARIABLES = {"var(--ink)": _INK, "var(--soft)": "#5a6675", "var(--paper)": "#ffffff"}
"""CSS variables of the figure of the flow, and their colours on a light page."""


def flow_chart(flow: Flow, read: str) -> str:
    """Draw the flow as an SVG element, in the manner of the figures of STARD and CONSORT."""
    stages, exclusions = _stages(flow, read)
    ends = [
        [
            subsets_text(subsets).capitalize(),
            *(
                counted(numbers.used[subsets], _NOUNS[level])
                for level, numbers in flow.items()
                if subsets in numbers.used
            ),
        ]
        for subsets in dict.fromkeys(
            subsets for numbers in flow.values() for subsets in numbers.used
        )
    ]
    width, width_of_excluded = _width([*stages, *ends]), _width(exclusions)
    middle = (max(len(ends), 1) * (width + _GAP) - _GAP) / 2 + 1
    boxes: list[tuple[float, float, float, list[str]]] = []
    lines, top = [], 1.0
    for stage, excluded in zip(stages, exclusions, strict=True):
        boxes.append((middle - width / 2, top, width, stage))
        bottom = top + _height(stage)
        top = bottom + _GAP
        if len(excluded) > 1:  # more than the title
            top = max(top, bottom + _height(excluded) + _PAD)
            branch, right = (bottom + top) / 2, middle + width / 2 + _GAP
            boxes.append((right, branch - _height(excluded) / 2, width_of_excluded, excluded))
            lines.append(f"M{middle:g} {branch:g}H{right:g}")
        lines.append(f"M{middle:g} {bottom:g}V{top:g}")
    for number_of_end, end in enumerate(ends):
        left = 1 + number_of_end * (width + _GAP)
        boxes.append((left, top + _GAP / 2, width, end))
        lines.append(f"M{middle:g} {top:g}H{left + width / 2:g}v{_GAP / 2:g}")
    return TEMPLATES.get_template("flow.svg.j2").render(
        boxes=[(x, y, wide, _height(texts), texts) for x, y, wide, texts in boxes],
        lines="".join(lines),
        width=max(x + wide for x, _, wide, _ in boxes) + 1,
        height=max(y + _height(texts) for _, y, _, texts in boxes) + 1,
        line=_ROW,
        pad=_PAD,
    )


def write_flow(flow: Flow, path: Path, *, read: str) -> None:
    """Write the flow as an SVG file, in the colours of a light page, by one rename. `read` as for `flow_blocks`."""
    text = flow_chart(flow, read)
    for variable, colour in _LIGHT_VARIABLES.items():
        text = text.replace(variable, colour)
    text = text.replace("<svg ", '<svg font-family="system-ui, sans-serif" ', 1)
    write_atomically(path, text)


def _stages(flow: Flow, read: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the texts of the boxes before each step, and of what the step excludes."""
    left = {level: numbers.total for level, numbers in flow.items()}
    stages, exclusions = [], []
    steps = [("Listed", CHOSEN), ("Found", READ), (read, LABELLED), ("Labelled", SELECTED)]
    with_cohort = any(numbers.excluded_at(CHOSEN) for numbers in flow.values())
    for title, step in steps if with_cohort else steps[1:]:
        stages.append([title, *(counted(count, _NOUNS[level]) for level, count in left.items())])
        excluded = ["Excluded"]
        for level, numbers in flow.items():
            for reason, count in numbers.excluded_at(step).items():
                excluded.append(f"{counted(count, _NOUNS[level])}: {reason}")
                left[level] -= count
        exclusions.append(excluded)
    return stages, exclusions


def _width(boxes: Iterable[Sequence[str]]) -> float:
    return max(len(text) for texts in boxes for text in texts) * _CHARACTER + 2 * _PAD


def _height(texts: Sequence[str]) -> float:
    return len(texts) * _ROW + 2 * _PAD - 4
