"""Shares, settings and names as text, for facts of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.errors import HistopipeError
from histopipe.evaluation.subgroups import NoValue, group_name
from histopipe.features.feature_file import paths_of_stores
from histopipe.predictions.tables import PREDICTIONS, read_predictions
from histopipe.reports.evaluation_blocks import EvaluatedPredictions
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.result import METRICS, TrainResult, read_result, read_slides
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig, load_config
from histopipe.splits.slide_table import SlideEntry
from histopipe.splits.splits import SPLITS
from histopipe.splits.subsets import SUBSETS, Subset
from histopipe.store.catalog import parts_of
from histopipe.store.store import Store
from histopipe.system.csv_files import FLAGS, cell_number, is_number, read_dicts
from histopipe.system.files import read_json_object, reading
from histopipe.system.output import counted, listed
from histopipe.tasks.choices import TaskName
from histopipe.tasks.task import Predictions, Task

SUBSET_NAMES: Mapping[Subset, str] = {
    "train": "training",
    "validation": "validation",
    "test": "test",
}


def plain(value: object) -> str:
    """Return a setting as text: `a, b` of a list, `a = 1, b = 2` of a mapping."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {plain(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value)


def percent(share: float) -> str:
    """Return a share as a percentage, such as `50 %`."""
    return f"{100 * share:.3g} %"


@dataclass(frozen=True, slots=True)
class RunData:
    """A finished run, with the contents of its files.

    `history` has one row per epoch. `stores` are the open stores that were found.
    `missing` lists the parts that could not be read, with the reasons. `slides` are the rows of `slides.csv`.
    """

    folder: Path
    config: TrainConfig
    result: TrainResult
    metrics_file: Mapping[str, Any]
    splits: Mapping[str, Any]
    history: Sequence[Mapping[str, float | None]]
    predictions: Mapping[Subset, Predictions]
    stores: Sequence[Store]
    missing: Sequence[str]
    slides: Sequence[SlideEntry] = ()

    @property
    def evaluated(self) -> EvaluatedPredictions:
        """Its evaluation."""
        result, config = self.result, self.config
        return EvaluatedPredictions(
            result.metrics, self.predictions, config.evaluation_settings, result.breakdown, result.flow,
            result.calibration,
        )  # fmt: skip

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names."""
        return tuple(self.metrics_file["classes"])


def read_run(
    folder: Path, stores: Sequence[Path], stack: ExitStack, *, follow: bool = True
) -> RunData:
    """Read a finished run and open `stores`. If `stores` is empty and `follow` is true, open the stores of the run.

    Raises:
        UsageError: there is no finished run, or it is a cross-validation.
        DamagedStore: the run cannot be read.
    """
    run_folder.check_one_run(folder)
    result = read_result(folder)
    config = load_config(folder / run_folder.CONFIG)
    opened, missing = open_stores(config, stores, stack, follow=follow)
    return RunData(
        folder, config, result, read_json_object(folder / METRICS),
        read_json_object(folder / SPLITS),
        _history(folder / run_folder.HISTORY),
        read_predictions(folder / PREDICTIONS), opened, missing, read_slides(folder),
    )  # fmt: skip


def open_stores(
    config: TrainConfig, stores: Sequence[Path], stack: ExitStack, *, follow: bool
) -> tuple[list[Store], list[str]]:
    """Open `stores`, or else with `follow` those of the run or of its features. Return them, and what is missing for pictures."""
    opened: list[Store] = []
    if not follow and not stores:
        return [], ["No pictures of patches and slides: use --store to name the stores."]
    paths, missing, on_bags = list(stores), [], isinstance(config, BagTrainConfig)
    try:
        paths = paths or paths_of_stores(config.values())
    except HistopipeError as error:
        missing.append(f"No pictures of patches and slides: {error}.")
    for path in paths:
        try:
            opened += [stack.enter_context(Store(part)) for part in parts_of(path)]
        except HistopipeError as error:
            missing.append(f"No pictures of patches and slides: {error}.")
    if on_bags and not opened and not missing:
        missing.append("No heatmaps of attention: use --store to name the store of the patches.")
    return opened, missing


def _history(path: Path) -> list[dict[str, float | None]]:
    with reading(path):
        return [
            {name: float(cell) if cell else None for name, cell in row.items()}
            for row in read_dicts(path)
        ]


_STRATA: dict[TaskName, str] = {
    "classification": "class", "multilabel": "label", "regression": "value", "survival": "event and time",
}  # fmt: skip

_MOST = 12
"""Most different values of a column that are listed."""


def _sites(run: RunData) -> str | None:
    sites = _counted(run, "site")
    return None if sites is None else f"Slides found by site: {sites}."


def _scanners(run: RunData) -> str | None:
    vendors = _counted(run, "vendor")
    return None if vendors is None else f"Vendors of the scanners by file format: {vendors}."


def _scale(run: RunData) -> str | None:
    scales = sorted({float(slide.value("mpp")) for slide in run.slides if slide.value("mpp")})
    if not scales:
        return None
    ends = f"{scales[0]:g}" if len(scales) == 1 else f"{scales[0]:g} to {scales[-1]:g}"
    return f"Slides were scanned at {ends} µm per pixel."


def _label_sources(run: RunData) -> str | None:
    sources = _counted(run, "label_source")
    return None if sources is None else f"Sources of the labels: {sources}."


def _counted(run: RunData, column: str) -> str | None:
    counts = Counter(slide.value(column) for slide in run.slides if slide.value(column))
    return (
        listed([f"{name} ({counted(count, 'slide')})" for name, count in sorted(counts.items())])
        or None
    )


def _exclusions(run: RunData) -> str | None:
    texts = [
        f"{level}: {listed([f'{count:,} ({why})' for why, count in numbers.excluded.items()])}"
        for level, numbers in run.result.flow.items()
        if numbers.excluded
    ]
    return f"Excluded {'; '.join(texts)}." if texts else None


def _flow(run: RunData) -> str | None:
    texts = []
    for level, numbers in run.result.flow.items():
        used = listed(
            [
                f"{count:,} {'is' if count == 1 else 'are'} in {' and '.join(map(SUBSET_NAMES.__getitem__, subsets))}"
                for subsets, count in numbers.used.items()
            ]
        )
        texts.append(
            f"Of {numbers.total:,} {level} found, {sum(numbers.excluded.values()):,} were excluded, and {used}."
        )
    return " ".join(texts) or None


def _participants_by_label(run: RunData) -> str | None:
    """Count the patients of each subset, by class, or with their events or labels; None if these are not known."""
    if getattr(run.config, "labels_from", "") == "annotation":
        return None
    texts = []
    for subset in SUBSETS:
        patients: dict[str, list[SlideEntry]] = {}
        for slide in run.slides:
            if subset in slide.subsets:
                patients.setdefault(slide.patient, []).append(slide)
        if patients:
            outcomes = _outcomes(run.evaluated.task, list(patients.values()))
            if outcomes is None:
                return None
            texts.append(f"{SUBSET_NAMES[subset]} {outcomes}")
    return f"Patients: {'; '.join(texts)}." if texts else None


def _outcomes(task: Task, patients: Sequence[Sequence[SlideEntry]]) -> str | None:
    """Return the number of patients by class, or of all with the number of events or of each label."""
    if task.of_classes:
        labels = [{slide.label for slide in slides} for slides in patients]
        counts = Counter(
            next(iter(patient_labels)) if len(patient_labels) == 1 else "several labels"
            for patient_labels in labels
        )
        return listed([f"{counts[name]:,} {name}" for name in sorted(counts)])
    if not all(
        name in slide.cells for slides in patients for slide in slides for name in task.flags
    ):
        return None
    cells = {
        name: [[slide.cells[name] for slide in slides] for slides in patients]
        for name in task.flags
    }
    happened = {
        name: sum(
            any(FLAGS.get(cell.lower(), cell_number(cell)) == 1 for cell in patient_cells)
            for patient_cells in each
        )
        for name, each in cells.items()
    }
    return " with ".join(filter(None, (f"{len(patients):,}", task.flag_counts(happened))))


def _characteristics(run: RunData) -> str | None:
    """Return the further columns of the labels file by subset: counts, or median and range of numbers."""
    columns = dict.fromkeys(name for slide in run.slides for name in slide.cells)
    texts = []
    for column in columns:
        values = {subset: _values(run.slides, subset, column) for subset in SUBSETS}
        every = [cell for cells in values.values() for cell in cells if cell]
        numeric = bool(every) and all(map(is_number, every)) and len(set(every)) > _MOST
        if not numeric and len(set(every)) > _MOST:
            continue
        described = _range_of if numeric else _counts_of
        parts = [
            f"{SUBSET_NAMES[subset]} {described(cells)}"
            for subset, cells in values.items()
            if cells
        ]
        texts.append(f"{column} of slides: {'; '.join(parts)}.")
    return " ".join(texts) or None


def _values(slides: Sequence[SlideEntry], subset: Subset, column: str) -> list[str]:
    return [
        slide.cells.get(column, "") for slide in slides if subset in slide.status.split(" and ")
    ]


def _range_of(values: Sequence[str]) -> str:
    numbers = np.array([float(value) for value in values if value])
    missing = f", {len(values) - len(numbers)} missing" if len(numbers) < len(values) else ""
    if not len(numbers):
        return f"{len(values)} missing"
    return (
        f"median {np.median(numbers):.4g}, from {numbers.min():.4g} to {numbers.max():.4g}{missing}"
    )


def _counts_of(values: Sequence[str]) -> str:
    counts = Counter(group_name(value or NoValue.MISSING) for value in values)
    return listed([f"{counts[name]} × {name}" for name in sorted(counts)], most=_MOST + 1)


def _labels(run: RunData) -> str:
    config = run.config
    if getattr(config, "labels_from", "slide") == "annotation":
        return "The classes of patches come from annotations."
    if isinstance(config, BagTrainConfig):
        return f"Each {config.bag} has its own outcome."
    return "Each slide has its own outcome, which applies to all its patches."


def _tiling(run: RunData) -> str | None:
    spec = run.metrics_file.get("spec")
    if not isinstance(spec, dict):
        return None
    scale = f"{spec['mpp']:g} µm per pixel" if spec.get("mpp") else f"level {spec.get('level')}"
    side, overlap = spec.get("patch_size"), spec.get("overlap")
    apart = f"an overlap of {overlap} pixels" if overlap else "no overlap"
    apart += {
        "shift": "; the last column and row were moved to the edge of a slide",
        "pad": "; the last column and row were padded beyond the edge of a slide",
    }.get(spec.get("edge", ""), "")
    algorithm = (spec.get("algorithms") or {}).get("tissue") or spec.get("tissue")
    detection = "Tissue was not detected: all patches were used." if spec.get("tissue") == "none" else (
        f"Tissue was detected with {algorithm}, and patches with at least {percent(spec.get('tissue_threshold') or 0)} "
        "tissue were used."
    )  # fmt: skip
    return f"Slides were divided into patches of {side} × {side} pixels at {scale}, with {apart}. {detection}"


def _encoding(run: RunData) -> str | None:
    spec = run.metrics_file.get("spec")
    routes = {slide.value("route") for slide in run.slides} - {""}
    if not isinstance(spec, dict) or not routes:
        return None
    if spec.get("codec") == "png":
        return "Patches were stored without loss."
    if routes == {"copy"}:
        return "Patches are the JPEG tiles of the slides, which were not encoded again."
    return f"Patches that were encoded again are JPEG images with quality {spec.get('quality')}."


def _preprocessing(run: RunData) -> str | None:
    stain = getattr(run.config, "stain_norm", None)
    if stain is None:
        return None
    return (
        "Stains were not normalized."
        if stain == "none"
        else f"Stains were normalized by the method {stain}."
    )


def _patch_selection(run: RunData) -> str | None:
    config = run.config
    if not isinstance(config, PatchTrainConfig):
        return None
    bounds = [
        text
        for active, text in (
            (config.min_tissue > 0, f"at least {percent(config.min_tissue)} tissue"),
            (config.min_focus > 0, f"a focus of at least {config.min_focus:g}"),
            (config.exclude_pen < 1, f"at most {percent(config.exclude_pen)} pen marks"),
            (config.exclude_dark < 1, f"at most {percent(config.exclude_dark)} folds or black"),
        )
        if active
    ]
    chosen = (
        f"Patches with {listed(bounds)} were used."
        if bounds
        else "No patch was left out for its quality."
    )
    if config.max_per_slide:
        chosen += f" Each epoch drew at most {counted(config.max_per_slide, 'patch')} per slide."
    return chosen


def _split(run: RunData) -> str:
    if of_cross_validation(run):
        return "The data were divided by the cross-validation that this run belongs to."
    if run.config.splits is not None:
        return "The data were divided into training, validation and test by an existing file of splits."
    splits = run.splits
    shares = listed([percent(share) for share in splits.get("fractions", ())])
    balanced, seed = splits.get("algorithm") == "balanced", f"with seed {splits.get('seed')}"
    if splits.get("column") is not None:
        return f"Column {splits['column']} of the labels file divided the data." + (
            f" Validation was drawn from training at random, {seed}." if balanced else ""
        )
    units = f"{splits.get('split_by')}s, {run.config.unit} and " if balanced else ""
    return (
        f"The data were divided at random into training, validation and test ({shares}), stratified by "
        f"{units}{_STRATA[run.config.task]}, {seed}."
    )


def _split_level(run: RunData) -> str:
    by = str(run.splits.get("split_by"))
    if by == "region":
        return (
            f"Squares of {getattr(run.config, 'region_um', 0):g} µm of a slide are in one part; a slide may be in "
            "several."
        )
    if by == "patch":
        return "A slide may have patches in several parts."
    if not run.slides:  # of an earlier version
        return f"The data were divided by {by}."
    subsets: dict[str, dict[str, set[str]]] = {"patient": {}, "site": {}, "slide": {}}
    for slide in run.slides:
        for what, of_value in subsets.items():
            if slide.subsets and slide.value(what):
                of_value.setdefault(slide.value(what), set()).update(slide.subsets)
    several = {
        what: sum(len(value_subsets) > 1 for value_subsets in of_value.values())
        for what, of_value in subsets.items()
    }
    texts = [
        f"{counted(count, what)} {'is' if count == 1 else 'are'} in more than one part"
        for what, count in several.items()
        if count and (what != "site" or by == "site")
    ]
    if not several[by]:
        texts.append(f"no {by} is in more than one part")
    return f"{'; '.join(texts).capitalize()}."


def _split_sizes(run: RunData) -> str | None:
    if not run.evaluated.task.of_classes:
        return None
    counts = run.splits.get("counts", {})
    texts = [
        f"{SUBSET_NAMES[subset]} {listed([f'{count:,} {name}' for name, count in counts[subset].items()])}"
        for subset in SUBSETS
        if counts.get(subset)
    ]
    unit = run.config.unit.capitalize()
    return f"{unit} by class, before damaged ones were left out: {'; '.join(texts)}."


def of_cross_validation(run: RunData) -> bool:
    """Return whether a run is a fold of a cross-validation."""
    return run_folder.is_cross_validation(run.folder.resolve().parent)


FACTS: dict[str, tuple[str, Callable[[RunData], str | None]]] = {
    "sites": (run_folder.SLIDES, _sites),
    "scanners": (run_folder.SLIDES, _scanners),
    "scale": (run_folder.SLIDES, _scale),
    "label_sources": (run_folder.SLIDES, _label_sources),
    "exclusions": (METRICS, _exclusions),
    "flow": (METRICS, _flow),
    "participants_by_label": (run_folder.SLIDES, _participants_by_label),
    "characteristics": (run_folder.SLIDES, _characteristics),
    "tiling": (METRICS, _tiling),
    "encoding": (METRICS, _encoding),
    "preprocessing": (run_folder.CONFIG, _preprocessing),
    "patch_selection": (run_folder.CONFIG, _patch_selection),
    "labels": (run_folder.CONFIG, _labels),
    "split": (SPLITS, _split),
    "split_level": (f"{SPLITS}, {run_folder.SLIDES}", _split_level),
    "split_sizes": (SPLITS, _split_sizes),
}
"""Sentences by name, with the file that they come from."""
