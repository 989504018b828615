"""A finished run with the contents of its files, and sentences about its data. None: the run does not know."""

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
from histopipe.predictions.prediction_tables import PREDICTIONS, read_predictions
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
from histopipe.tasks.task import Predictions, Task

SUBSET_NAMES: Mapping[Subset, str] = {
    "train": "training",
    "validation": "validation",
    "test": "test",
}
OTHER_DATA_UNKNOWN = "Performance on slides from another hospital, scanner or stain is unknown"
_MOST = 12
"""Most different values of a column that are listed."""


def chosen_texts(*texts: tuple[bool, str]) -> list[str]:
    """Return the texts that apply."""
    return [text for applies, text in texts if applies]


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
            result.metrics,
            self.predictions,
            config.evaluation_settings,
            result.breakdown,
            result.flow,
            result.calibration,
        )

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
    config = load_config(folder / run_folder.CONFIG)
    opened, missing = open_stores(config, stores, stack, follow=follow)
    return RunData(
        folder,
        config,
        read_result(folder),
        read_json_object(folder / METRICS),
        read_json_object(folder / SPLITS),
        _history(folder / run_folder.HISTORY),
        read_predictions(folder / PREDICTIONS),
        opened,
        missing,
        read_slides(folder),
    )


def open_stores(
    config: TrainConfig, stores: Sequence[Path], stack: ExitStack, *, follow: bool
) -> tuple[list[Store], list[str]]:
    """Open `stores`, or else with `follow` those of the run or of its features. Return them, and what is missing for pictures."""
    if not follow and not stores:
        return [], ["No pictures of patches and slides: use --store to name the stores."]
    opened: list[Store] = []
    missing: list[str] = []
    try:
        paths = list(stores) or paths_of_stores(config.values())
    except HistopipeError as error:
        return [], [f"No pictures of patches and slides: {error}."]
    for path in paths:
        try:
            opened += [stack.enter_context(Store(part)) for part in parts_of(path)]
        except HistopipeError as error:
            missing.append(f"No pictures of patches and slides: {error}.")
    if isinstance(config, BagTrainConfig) and not opened and not missing:
        missing.append("No heatmaps of attention: use --store to name the store of the patches.")
    return opened, missing


def _history(path: Path) -> list[dict[str, float | None]]:
    with reading(path):
        return [
            {name: float(cell) if cell else None for name, cell in row.items()}
            for row in read_dicts(path)
        ]


Description = Mapping[str, tuple[str, str]]
"""Statements about a run by name, each with the file or files that it comes from."""
Describe = Callable[[RunData], str | None]
"""Returns sentences about a run; None or "" if the run does not know."""
STATEMENTS: dict[str, tuple[Describe, str]] = {}
"""Functions by name of the statement, with the files that they use."""


def statement(*files: str) -> Callable[[Describe], Describe]:
    """Return a decorator that registers `_describe_NAME`, which uses these files of a run, as the statement NAME."""

    def register(describe: Describe) -> Describe:
        STATEMENTS[describe.__name__.removeprefix("_describe_")] = describe, ", ".join(files)
        return describe

    return register


@statement(run_folder.SLIDES)
def _describe_sites(run: RunData) -> str | None:
    return _count_slides(run, "site", "Slides found by site")


@statement(run_folder.SLIDES)
def _describe_scanners(run: RunData) -> str | None:
    return _count_slides(run, "vendor", "Vendors of the scanners by file format")


@statement(run_folder.SLIDES)
def _describe_label_sources(run: RunData) -> str | None:
    return _count_slides(run, "label_source", "Sources of the labels")


def _count_slides(run: RunData, column: str, title: str) -> str | None:
    """Return a sentence with the number of slides by their value of a column."""
    counts = Counter(slide.value(column) for slide in run.slides if slide.value(column))
    texts = [f"{name} ({counted(count, 'slide')})" for name, count in sorted(counts.items())]
    return f"{title}: {listed(texts)}." if texts else None


@statement(run_folder.SLIDES)
def _describe_scale(run: RunData) -> str | None:
    scales = sorted({float(slide.value("mpp")) for slide in run.slides if slide.value("mpp")})
    ends = " to ".join(f"{scale:g}" for scale in dict.fromkeys([*scales[:1], *scales[-1:]]))
    return f"Slides were scanned at {ends} µm per pixel." if scales else None


@statement(METRICS)
def _describe_exclusions(run: RunData) -> str | None:
    texts = [
        f"{level}: {listed([f'{count:,} ({why})' for why, count in numbers.excluded.items()])}"
        for level, numbers in run.result.flow.items()
        if numbers.excluded
    ]
    return f"Excluded {'; '.join(texts)}." if texts else None


@statement(METRICS)
def _describe_flow(run: RunData) -> str | None:
    texts = []
    for level, numbers in run.result.flow.items():
        used = [
            f"{count:,} {'is' if count == 1 else 'are'} in {' and '.join(map(SUBSET_NAMES.__getitem__, subsets))}"
            for subsets, count in numbers.used.items()
        ]
        texts.append(
            f"Of {numbers.total:,} {level} found, {sum(numbers.excluded.values()):,} were excluded, and {listed(used)}."
        )
    return " ".join(texts)


@statement(run_folder.SLIDES)
def _describe_participants_by_label(run: RunData) -> str | None:
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
        counts = Counter("several labels" if len(names) > 1 else names.pop() for names in labels)
        return listed([f"{counts[name]:,} {name}" for name in sorted(counts)])
    if not all(
        name in slide.cells for slides in patients for slide in slides for name in task.flags
    ):
        return None
    happened = {
        name: sum(
            any(
                FLAGS.get(slide.cells[name].lower(), cell_number(slide.cells[name])) == 1
                for slide in slides
            )
            for slides in patients
        )
        for name in task.flags
    }
    return " with ".join(filter(None, (f"{len(patients):,}", task.flag_counts(happened))))


@statement(run_folder.SLIDES)
def _describe_characteristics(run: RunData) -> str | None:
    """Return the further columns of the labels file by subset: counts, or median and range of numbers."""
    texts = []
    for column in dict.fromkeys(name for slide in run.slides for name in slide.cells):
        by_subset = {
            subset: [slide.cells.get(column, "") for slide in run.slides if subset in slide.subsets]
            for subset in SUBSETS
        }
        values = {cell for cells in by_subset.values() for cell in cells if cell}
        if len(values) <= _MOST:
            describe = _counts_of
        elif all(map(is_number, values)):
            describe = _range_of
        else:
            continue
        parts = [
            f"{SUBSET_NAMES[subset]} {describe(cells)}"
            for subset, cells in by_subset.items()
            if cells
        ]
        texts.append(f"{column} of slides: {'; '.join(parts)}.")
    return " ".join(texts)


def _range_of(cells: Sequence[str]) -> str:
    numbers = np.array([float(cell) for cell in cells if cell])
    missing = f"{len(cells) - len(numbers)} missing"
    if not len(numbers):
        return missing
    text = f"median {np.median(numbers):.4g}, from {numbers.min():.4g} to {numbers.max():.4g}"
    return text if len(numbers) == len(cells) else f"{text}, {missing}"


def _counts_of(cells: Sequence[str]) -> str:
    counts = Counter(group_name(cell or NoValue.MISSING) for cell in cells)
    return listed([f"{counts[name]} × {name}" for name in sorted(counts)], most=_MOST + 1)


@statement(run_folder.CONFIG)
def _describe_labels(run: RunData) -> str:
    config = run.config
    if getattr(config, "labels_from", "slide") == "annotation":
        return "The classes of patches come from annotations."
    if isinstance(config, BagTrainConfig):
        return f"Each {config.bag} has its own outcome."
    return "Each slide has its own outcome, which applies to all its patches."


@statement(METRICS)
def _describe_tiling(run: RunData) -> str | None:
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
    detection = (
        "Tissue was not detected: all patches were used."
        if spec.get("tissue") == "none"
        else (
            f"Tissue was detected with {algorithm}, and patches with at least {percent(spec.get('tissue_threshold') or 0)} "
            "tissue were used."
        )
    )
    return f"Slides were divided into patches of {side} × {side} pixels at {scale}, with {apart}. {detection}"


@statement(METRICS)
def _describe_encoding(run: RunData) -> str | None:
    spec = run.metrics_file.get("spec")
    routes = {slide.value("route") for slide in run.slides} - {""}
    if not isinstance(spec, dict) or not routes:
        return None
    if spec.get("codec") == "png":
        return "Patches were stored without loss."
    if routes == {"copy"}:
        return "Patches are the JPEG tiles of the slides, which were not encoded again."
    return f"Patches that were encoded again are JPEG images with quality {spec.get('quality')}."


@statement(run_folder.CONFIG)
def _describe_preprocessing(run: RunData) -> str | None:
    stain = getattr(run.config, "stain_norm", None)
    texts = {None: None, "none": "Stains were not normalized."}
    return texts.get(stain, f"Stains were normalized by the method {stain}.")


@statement(run_folder.CONFIG)
def _describe_patch_selection(run: RunData) -> str | None:
    config = run.config
    if not isinstance(config, PatchTrainConfig):
        return None
    bounds = chosen_texts(
        (config.min_tissue > 0, f"at least {percent(config.min_tissue)} tissue"),
        (config.min_focus > 0, f"a focus of at least {config.min_focus:g}"),
        (config.exclude_pen < 1, f"at most {percent(config.exclude_pen)} pen marks"),
        (config.exclude_dark < 1, f"at most {percent(config.exclude_dark)} folds or black"),
    )
    text = f"Patches with {listed(bounds)} were used."
    if not bounds:
        text = "No patch was left out for its quality."
    if config.max_per_slide:
        text += f" Each epoch drew at most {counted(config.max_per_slide, 'patch')} per slide."
    return text


@statement(SPLITS)
def _describe_split(run: RunData) -> str:
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
        f"{units}{run.config.task_type.stratum}, {seed}."
    )


@statement(SPLITS, run_folder.SLIDES)
def _describe_split_level(run: RunData) -> str:
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
    several = {}
    for what in ("patient", "site", "slide"):
        subsets: dict[str, set[Subset]] = {}
        for slide in run.slides:
            subsets.setdefault(slide.value(what), set()).update(slide.subsets)
        several[what] = sum(len(of_value) > 1 for name, of_value in subsets.items() if name)
    texts = [
        f"{counted(count, what)} {'is' if count == 1 else 'are'} in more than one part"
        for what, count in several.items()
        if count and (what != "site" or by == "site")
    ]
    if not several[by]:
        texts.append(f"no {by} is in more than one part")
    return f"{'; '.join(texts).capitalize()}."


@statement(SPLITS)
def _describe_split_sizes(run: RunData) -> str | None:
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
