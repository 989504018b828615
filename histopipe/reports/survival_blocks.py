"""Parts of a report on survival: curves of risk groups, follow-up, calibration and proportional hazards, all of patients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from histopipe.evaluation import evaluate
from histopipe.evaluation.breakdown import EvaluatedPredictions
from histopipe.reports import charts
from histopipe.reports.html_page import Block, Cell, Table, number
from histopipe.system.output import counted
from histopipe.tasks.calibration import Reliability
from histopipe.tasks.predictions import Metrics
from histopipe.tasks.survival_curves import SurvivalChecks


def survival_charts(evaluated: EvaluatedPredictions) -> Iterator[Block | Table | None]:
    """Yield curves of the risk groups with numbers at risk, calibration, and proportional hazards, all of patients."""
    of_patients = {
        subset: evaluation.patient.get("mean") or evaluation.finest
        for subset, evaluation in evaluated.evaluations.items()
    }
    yield Block(
        "charts",
        [
            charts.survival_chart(
                f"Survival of patients, {subset}"
                + ("" if metrics.log_rank is None else f", log-rank p {metrics.log_rank:.2g}"),
                metrics.groups,
            )
            for subset, metrics in of_patients.items()
            if metrics.groups
        ],
    )
    for subset, metrics in of_patients.items():
        title = subset.capitalize()
        if metrics.groups:
            times = metrics.groups[0].at_risk_times
            yield Table(
                f"{title}: risk groups and numbers of patients at risk",
                ("group", "patients", "events", "median", *(f"at {time:.4g}" for time in times)),
                [
                    [
                        Cell(group.name),
                        number(group.count),
                        number(group.events),
                        number(group.median, 3),
                        *map(number, group.at_risk),
                    ]
                    for group in metrics.groups
                ],
            )
        if metrics.checks is not None:
            yield Block("text", survival_text(title, metrics))
            yield _calibration_table(title, metrics.checks)
    curves: dict[str, Reliability] = {
        subset: (metrics.checks.calibration, (np.empty(0), np.empty(0)))
        for subset, metrics in of_patients.items()
        if metrics.checks and metrics.checks.calibration
    }
    if curves:
        yield Block("charts", [charts.calibration_chart("Events until the horizon", curves)])


def survival_text(title: str, metrics: Metrics) -> str:
    """Return follow-up, and whether hazards are proportional, as a sentence. `metrics` have checks."""
    checks, events = metrics.checks, metrics.outcomes.get("events", 0)
    if checks is None:
        return ""
    texts = [f"{title}: {metrics.patients:,} patients with {counted(events, 'event')}"]
    if checks.follow_up is not None:
        texts.append(f"median follow-up {checks.follow_up:.4g} (reverse Kaplan-Meier)")
    if checks.slope is not None:
        texts.append(f"coefficient of the predicted risk in a Cox model {checks.slope:.3f}")
    if checks.hazards_p is not None:
        texts.append(f"proportional hazards p {checks.hazards_p:.2g} (scaled Schoenfeld residuals)")
    return f"{', '.join(texts)}."


def _calibration_table(title: str, checks: SurvivalChecks) -> Table | None:
    rows = [
        [
            Cell(f"{place.low:.3f} to {place.high:.3f}"),
            number(place.count),
            number(place.at_risk),
            number(place.probability, 3),
            Cell(evaluate.with_ends(place.observed, place.interval), place.observed, "n"),
        ]
        for place in checks.calibration
    ]
    return (
        Table(
            f"{title}: events until {checks.horizon:.4g}, predicted and observed by Kaplan-Meier",
            ("predicted risk", "patients", "at risk then", "mean", "observed"),
            rows,
        )
        if rows
        else None
    )
