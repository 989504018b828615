"""Compare encoders on one's own slides: probes of their features on the same folds, and what they know of the site."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.bags import BagSet
from histopipe.errors import UsageError
from histopipe.evaluation.evaluate import NARROW_FOLDS, metric_title, with_ends
from histopipe.runs.task_config import BagTrainConfig
from histopipe.studies.probe_data import ProbeData, open_features
from histopipe.studies.probe_models import (
    Probe,
    SubsetRows,
    crossed,
    few_shot_probe,
    linear_probe,
    neighbour_probe,
    robustness,
)
from histopipe.studies.study_settings import PROBED, ProbeSettings
from histopipe.system.arrays import FloatArray
from histopipe.system.files import (
    make_folder,
    read_json,
    reading,
    roomy,
    writable,
    write_atomically,
)
from histopipe.system.folders import PROBE
from histopipe.system.grouping import grouped_values
from histopipe.system.output import Progress, Result, aligned, counted, default_progress
from histopipe.system.settings import (
    check_known,
    declared_settings,
    make_settings,
    split_settings,
    takes,
)
from histopipe.system.table_files import write_table
from histopipe.tasks.choices import TaskName
from histopipe.tasks.classification import Classification
from histopipe.tasks.intervals import (
    FEWEST_PATIENTS,
    Difference,
    Interval,
    finite_or_none,
    interval_of,
    read_differences,
)
from histopipe.tasks.metrics import metrics_of
from histopipe.tasks.predictions import (
    EvaluationSettings,
    Predictions,
    differences_of,
    fold_of_patients,
    joined_predictions,
    labels_of,
    mean_resamples,
    paired_differences,
    scores_of,
)
from histopipe.tasks.statistics import bootstrap_draws

LINEAR, SITE, OTHER_SITES, INDEX = "linear", "site", "other sites", "robustness index"
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Score:
    """A probe of a feature set.

    Attributes:
        features: name of the feature set.
        probe: "linear", "20 neighbours", "4 per class", "other sites" (linear, trained on other sites), "site" (linear,
            of the site), or "robustness index".
        values, intervals: metrics by name, and their 95 % intervals.
        differences: metrics minus those of the first feature set; none of the first one.
        less_linear: of "other sites": metrics minus those of the linear probe on the same patients.
        p: of "linear": p value of the main metric, if labels were permuted.
    """

    features: str
    probe: str
    values: Mapping[str, float | None]
    intervals: Mapping[str, Interval]
    differences: Mapping[str, Difference] = field(default_factory=dict)
    less_linear: Mapping[str, Difference] = field(default_factory=dict)
    p: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class ProbeResult(Result):
    """Result of `probe`.

    Attributes:
        folder: folder of `probe.csv` and `probe.json`.
        task: what was predicted.
        items, patients: number of bags in all feature sets, and of their patients.
        sets: folder, dimension, bytes per patch and number of patches of each feature set, by name.
        scores: the probes, in the order of the table.
        notes: remarks on what was left out.
    """

    folder: Path
    task: TaskName
    items: int
    patients: int
    sets: Mapping[str, Mapping[str, Any]]
    scores: tuple[Score, ...]
    notes: tuple[str, ...] = ()

    def table(self) -> list[str]:
        """Return the metrics of all probes as lines."""
        lines = []
        for probe in dict.fromkeys(score.probe for score in self.scores):
            scores = [score for score in self.scores if score.probe == probe]
            names, first = list(scores[0].values), scores[0].features
            further = {f"less {first}": "differences"}
            if any(score.less_linear for score in scores):
                further[f"less {LINEAR}"] = "less_linear"
            with_p = scores[0].p is not None
            titles = [metric_title(name, self.task) for name in names]
            rows = [[probe, *titles, *further, *["p"] * with_p]]
            for score in scores:
                cells = [
                    with_ends(value, score.intervals.get(name))
                    for name, value in score.values.items()
                ]
                for attribute in further.values():
                    of_main = getattr(score, attribute).get(names[0])
                    cells.append(
                        with_ends(of_main.value, of_main.interval, signed=True) if of_main else ""
                    )
                cells += [f"{score.p:.3f}"] if score.p is not None else []
                rows.append([f"  {score.features}", *cells])
            lines += ["", *aligned(rows)]
        return lines

    def __str__(self) -> str:
        count = f"{counted(self.items, 'bag')} of {counted(self.patients, 'patient')}"
        return "\n".join([count, *self.table(), "", *self.notes, str(self.folder / PROBE)])


@takes(
    declared_settings(ProbeSettings),
    {name: declared_settings(BagTrainConfig)[name] for name in PROBED},
)
def probe(
    features: str | Path | Sequence[str | Path],
    *,
    out: str | Path = "probe",
    progress: Progress | None = None,
    **settings: Any,
) -> ProbeResult:
    """Compare feature sets of the same slides by probes, without training a network.

    Each bag is the mean of its patches. On the same folds of the patients: a linear model, nearest neighbours, and few
    patients per class. Where at least two sites have slides of two classes: how well the site is predicted, how well a
    model of other sites predicts, and the robustness index of patches. Intervals are over patients. Metrics that rank, such as
    the AUC, are formed within the test set of each fold.

    Args:
        features: folders of `embed`, CLAM or TRIDENT; differences are from the first one.
        out: folder of the results.
        progress: shows messages; `default_progress()` if None.
        settings: fields of `ProbeSettings`, and those of a training on bags that name labels, task and split.

    Returns:
        The metrics of all probes.

    Raises:
        UsageError: a setting is wrong, two feature sets have the same name, or they have no slide in common.
        NothingToDo: there are no features, or no labels.
        DamagedStore: features cannot be read.

    Example:
        >>> probe(["features/uni", "features/virchow2"], labels="labels.csv").scores[0].values  # doctest: +SKIP
    """
    of_probe, of_data = split_settings(settings, ProbeSettings)
    check_known(of_data, PROBED, "unknown options")
    options, display = make_settings(ProbeSettings, of_probe), progress or default_progress()
    folders = [features] if isinstance(features, str | Path) else list(features)
    names = [Path(folder).resolve().name for folder in folders]
    if not folders or len(set(names)) < len(names):
        raise UsageError(
            "FEATURES",
            found=", ".join(map(str, folders)),
            expected="folders with different names",
        )
    opened = [open_features(Path(folder), of_data) for folder in folders]
    for _, bags, _ in opened:
        for note in bags.notes:
            display.message(note)
    data = ProbeData.of(dict(zip(names, opened, strict=True)), options)
    make_folder(Path(out))  # before the work, which takes minutes
    study = _Probing(data, options, display)
    scores = [*study.probed(), *study.of_sites()]
    result = ProbeResult(
        Path(out),
        data.blank.task.name,
        len(data.blank),
        len(data.blank.patients),
        {name: _described(bags) for name, bags in data.sets.items()},
        tuple(scores),
        tuple(study.notes),
    )
    _write(result)
    return result


def _described(bags: BagSet) -> dict[str, Any]:
    itemsize = np.result_type(*(bag.dtype for bag in bags)).itemsize
    return {
        "folder": str(bags.path),
        "dimension": bags.dimension,
        "bytes_per_patch": bags.dimension * itemsize,
        "patches": sum(bag.rows for bag in bags),
    }


class _Probing:
    """The probes of all feature sets."""

    def __init__(self, data: ProbeData, options: ProbeSettings, progress: Progress) -> None:
        self.data, self.options = data, options
        self.settings: EvaluationSettings = data.config.evaluation_settings
        self.progress, self.linear = progress, dict[str, Predictions]()
        self.features = {name: data.features(bags, progress) for name, bags in data.sets.items()}
        missing = counted(data.missing, "labelled bag")
        self.notes = [f"left out: {missing} that a feature set lacks"] if data.missing else []
        if data.blank.task.ranked != "pearson":
            self.notes.append(NARROW_FOLDS)

    def probed(self) -> Iterator[Score]:
        """Yield the probes of the targets."""
        data, options, seed = self.data, self.options, self.settings.seed
        task, patient = data.blank.task, data.blank.patient
        linear = [*self._scores(LINEAR, [partial(linear_probe, task=task)], data.blank, data.folds)]
        yield from self._with_p(linear) if options.permutations else linear
        if task.has_mean:
            probe = partial(neighbour_probe, task=task, count=options.neighbours)
            yield from self._scores(
                f"{options.neighbours} neighbours", [probe], data.blank, data.folds
            )
        for shots in options.shots if task.of_classes else ():
            draws = [
                partial(few_shot_probe, task=task, patients=patient, shots=shots, seed=[seed, draw])
                for draw in range(options.draws)
            ]
            yield from self._scores(f"{shots} per class", draws, data.blank, data.folds)

    def of_sites(self) -> Iterator[Score]:
        """Yield what the features know of the site; nothing with fewer than two sites."""
        data, (names, sites) = self.data, self.data.sites
        if len(names) < 2:
            self.notes.append("sites: not compared, because fewer than two are known")
            return
        if data.site_folds:
            probes = [partial(linear_probe, task=data.blank.task)]
            yield from self._scores(OTHER_SITES, probes, data.blank, data.site_folds)
        task = Classification(classes=names)
        target = np.where(sites >= 0, sites, np.nan)[:, None].astype(np.float64)
        folds: list[Any] = [tuple(rows[sites[rows] >= 0] for rows in fold) for fold in data.folds]
        if all(len(np.unique(sites[train])) > 1 for train, _, _ in folds):
            of_sites = replace(data.blank, task=task, target=target)
            yield from self._scores(SITE, [partial(linear_probe, task=task)], of_sites, folds)
        if data.blank.task.of_classes:
            yield from self._indices(names, sites)

    def _scores(
        self,
        name: str,
        probes: Sequence[Probe],
        blank: Predictions,
        folds: Sequence[SubsetRows],
    ) -> Iterator[Score]:
        first: list[Predictions] = []
        for features, of_items in self.features.items():
            each = [self._tested(probe, of_items, blank, folds) for probe in probes]
            scores, draws = [part for part, _ in each], each[0][1]
            main = [*scores[0].task.main]
            if len(scores) == 1:
                metrics = metrics_of(scores[0], draws=draws)
                values, intervals = metrics.values, metrics.intervals
            else:
                values, intervals = self._summary(mean_resamples(scores, draws, 1))
            differences = differences_of(first, scores, draws) if first else {}
            first, less_linear = first or scores, {}
            if name == LINEAR:
                self.linear[features] = scores[0]
            elif name == OTHER_SITES and blank.level != "patch":
                both = paired_differences(self.linear[features], scores[0], self.settings)
                less_linear = next(iter(both.values()))
            yield Score(
                features,
                name,
                {metric: values[metric] for metric in main},
                {metric: intervals[metric] for metric in main if metric in intervals},
                {metric: differences[metric] for metric in main if metric in differences},
                {metric: less_linear[metric] for metric in main if metric in less_linear},
            )

    def _tested(
        self,
        probe: Probe,
        features: NDArray[np.float32],
        blank: Predictions,
        folds: Sequence[SubsetRows],
    ) -> tuple[Predictions, FloatArray]:
        """Return the test predictions of a probe in the order of the items, and resamples of patients within folds."""
        parts = crossed(probe, features, blank, folds)
        joined = joined_predictions(parts, as_folds=True)
        ordered = joined.rows(np.argsort(np.concatenate([test for *_, test in folds])))
        draws = bootstrap_draws(
            len(blank.patients),
            self.settings.resamples,
            self.settings.seed,
            fold_of_patients(parts),
        )
        return scores_of(ordered, ordered.level, "mean", self.settings), draws

    def _with_p(self, scores: Sequence[Score]) -> Iterator[Score]:
        """Yield the scores of the linear probe with p values of the main metric, from permutations of the labels.

        Labels are exchanged among patients of a site. Folds are drawn, and penalties chosen, again each time.

        Source:
            B. Phipson and G. K. Smyth, Permutation p-values should never be zero, Statistical Applications in Genetics and
            Molecular Biology 9 (2010).
        """
        data, count = self.data, self.options.permutations
        task, main, at_least = data.blank.task, next(iter(data.blank.task.main)), dict[str, int]()
        total, probe = count * len(scores), partial(linear_probe, task=task)
        with self.progress.bar("permuting labels", unit="permutations", total=total) as bar:
            for number in range(count):
                target, folds = data.permuted(number)
                blank = replace(data.blank, target=target)
                for score in scores:
                    parts = crossed(probe, self.features[score.features], blank, folds)
                    joined = joined_predictions(parts, as_folds=True)
                    value = (
                        joined.task.with_settings(self.settings).statistics(joined).values()[main]
                    )
                    reached = score.values[main]
                    higher = value is None or reached is None or value >= reached - _ROUNDING
                    at_least[score.features] = at_least.get(score.features, 0) + higher
                    bar.advance(1)
        self.notes.append(f"p: {count} permutations of the labels among the patients of a site")
        for score in scores:
            yield replace(score, p=(1 + at_least[score.features]) / (1 + count))

    def _indices(self, names: Sequence[str], sites: NDArray[np.int32]) -> Iterator[Score]:
        data, first, main = self.data, dict[str, FloatArray](), "robustness_index"
        patients, seed = len(data.blank.patients), self.settings.seed
        # Patients of the same classes and sites are exchanged: the design stays the same.
        class_and_site = zip(labels_of(data.blank.target).tolist(), sites.tolist(), strict=True)
        designs = grouped_values(zip(data.blank.patient.tolist(), class_and_site, strict=True))
        texts = [str(sorted(set(designs.get(patient, ())))) for patient in range(patients)]
        stratum = np.unique(texts, return_inverse=True)[1].astype(np.int32)
        draws = bootstrap_draws(patients, self.settings.resamples, seed, stratum)
        weights = np.vstack([np.ones(patients), draws])
        for features, bags in data.sets.items():
            drawn, owner = (
                data.drawn(bags)
                if data.patches is None
                else (self.features[features], np.arange(len(data.owner)))
            )
            patient, site = data.blank.patient[owner], sites[owner]
            labels = labels_of(data.blank.target)[owner]
            counts = robustness(drawn, labels, site, patient, self.options.neighbours, seed)
            of_site = [counts.index(weights, n) for n in range(len(names))]
            worst = int(np.nanargmin([np.nan_to_num(index[0], nan=2.0) for index in of_site]))
            by_metric = {
                main: counts.index(weights),
                "worst_site": of_site[worst],
            }
            values, intervals = self._summary(by_metric)
            values["index_of_noise"] = finite_or_none(counts.of_noise)
            if counts.left_out:
                self.notes.append(
                    f"{features}: {counts.left_out} of {counts.compared} comparisons of two classes at two sites are left out of "
                    f"the robustness index, since one of the four has fewer than {self.options.neighbours} patches"
                )
            self.notes.append(
                f"{features}: no two sites have neighbours of two classes"
                if np.isnan(by_metric[main][0])
                else f"{features}: the worst site is {names[worst]}"
            )
            differences = self._differences({main: by_metric[main] - first[main]}) if first else {}
            first = first or by_metric
            yield Score(features, INDEX, values, intervals, differences)

    def _summary(
        self, by_metric: Mapping[str, FloatArray]
    ) -> tuple[dict[str, float | None], dict[str, Interval]]:
        """Return values and intervals of metrics, from the value of all patients and then of each resample."""
        patients = len(self.data.blank.patients)
        ends = {
            name: interval_of(values[1:], patients)
            for name, values in by_metric.items()
            if patients >= FEWEST_PATIENTS and len(values) > 1
        }
        values = {name: finite_or_none(values[0]) for name, values in by_metric.items()}
        return values, {name: both for name, both in ends.items() if both is not None}

    def _differences(self, by_metric: Mapping[str, FloatArray]) -> dict[str, Difference]:
        values, intervals = self._summary(by_metric)
        return {name: Difference(value, intervals.get(name)) for name, value in values.items()}


def read_probe(folder: Path) -> ProbeResult:
    """Read the result of a folder of `probe`.

    Raises:
        DamagedStore: it cannot be read.
    """
    with reading(folder / PROBE):
        content = read_json(folder / PROBE)
        scores = [
            Score(
                score["features"],
                score["probe"],
                score["values"],
                {name: tuple(ends) for name, ends in score["intervals"].items()},
                read_differences(score["differences"]),
                read_differences(score.get("less_linear", {})),
                score.get("p"),
            )
            for score in content.pop("scores")
        ]
        notes = tuple(content.pop("notes"))
        return ProbeResult(**{**content, "folder": folder}, scores=tuple(scores), notes=notes)


_TABLE = (
    *("features", "probe", "metric", "value", "low", "high"),
    *("difference", "low", "high", "less_linear", "low", "high", "p"),
)
"""Columns of `probe.csv`."""


def _write(result: ProbeResult) -> None:
    """Write the table as CSV, and everything as JSON."""
    rows = []
    for score in result.scores:
        for metric, value in score.values.items():
            cells = [value, *(score.intervals.get(metric) or (None, None))]
            for differences in (score.differences, score.less_linear):
                difference = differences.get(metric, Difference(None, None))
                cells += [difference.value, *(difference.interval or (None, None))]
            cells.append(score.p if metric == next(iter(score.values)) else None)
            rows.append([score.features, score.probe, metric, *cells])
    with roomy(result.folder), writable(result.folder):
        result.folder.mkdir(parents=True, exist_ok=True)
        write_table(result.folder / "probe.csv", _TABLE, rows)
        write_atomically(result.folder / PROBE, json.dumps(result.to_json(), indent=1) + "\n")
