"""The data of a training and its split into training, validation and test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from histopipe.dataset.labelling import Labelling, read_slide_labels
from histopipe.dataset.participants import Participant, participants
from histopipe.dataset.sample_table import SampleSource
from histopipe.dataset.selection import store_paths
from histopipe.dataset.splits import Splits, read_splits, recorded_numbers
from histopipe.dataset.splitting import make_splits
from histopipe.errors import UsageError
from histopipe.features.bag_participants import bag_participants
from histopipe.features.bags import BagSet
from histopipe.geometry import Micrometres
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig
from histopipe.store.store import StoreSet
from histopipe.system.csv_files import NA_VALUES, nfc, similar_values
from histopipe.system.progress import SilentProgress, message
from histopipe.tasks.registry import make_task


@contextmanager
def opened_sources(
    config: TrainConfig, splits: str | Path | None = None
) -> Iterator[Sequence[SampleSource]]:
    """Open the stores or the bags of a training. `splits` is the splits.json to be read, if any.

    Raises:
        HistopipeError: a source cannot be read, or sources do not fit together.
    """
    if isinstance(config, BagTrainConfig):
        bags = BagSet(
            [Path(folder) for folder in config.mil],
            bag=config.bag,
            labels=None if config.labels is None else Path(config.labels),
            # All slides of a patient are on one side, so that its bag is.
            columns=(
                *config.target_columns,
                *config.covariates,
                *filter(None, [config.split_column]),
            ),
            more_columns=[
                name
                for name in config.further_columns
                if name not in (*config.covariates, config.split_column)
            ],
            with_label=config.task == "classification",
            allow_extra=config.allow_extra_rows,
            na=config.na,
            on_error=config.on_error,
            # An existing split has its labels: the training that made it has reported on the file.
            notify=message if splits is None else SilentProgress().message,
            numbers=None if splits is None else recorded_numbers(Path(splits)),
        )
        yield [bags]
    elif isinstance(config, PatchTrainConfig):
        with closing(StoreSet(store_paths(config.stores))) as opened:
            yield opened.stores


def _warn_of_recorded(sources: Sequence[SampleSource], notify: Callable[[str], None]) -> None:
    """Warn of recorded names that are probably missing values, or that may be one name."""
    for what in ("label", "patient", "site"):
        names = {
            getattr(record, what) or "" for source in sources for record in source.records.values()
        }
        missing = [f"{name!r} is no missing value" for name in sorted(names & set(NA_VALUES))]
        for problem in filter(None, (*missing, similar_values(names))):
            notify(f"warning: recorded {what}: {problem}; --labels replaces it")


def new_splits(config: TrainConfig, sources: Sequence[SampleSource]) -> Splits:
    """Return the splits for a configuration: read from its file if it names one, else computed.

    Raises:
        UsageError: a patient or slide is on several sides.
    """
    if config.splits is not None:
        splits = read_splits(Path(config.splits), sources)
        if config.split_column not in (None, splits.column):
            raise UsageError(
                f"--splits {config.splits} is not from --split-column {config.split_column}",
                todo="leave one of them out",
            )
        expected = (config.task, config.target_columns, getattr(config, "covariates", ()))
        if (splits.task_name, splits.targets, splits.covariates) != expected:
            raise UsageError(
                f"--splits {config.splits}", found=f"{splits.task_name} {' '.join((*splits.targets, *splits.covariates))}",
                expected=f"{expected[0]} {' '.join((*expected[1], *expected[2]))}", todo="create new splits",
            )  # fmt: skip
        if isinstance(config, PatchTrainConfig):
            _check_given(splits, config, sources)
    else:
        splits = make_splits(sources, **split_options(config, sources))
        for line in splits.shortages(config.unit):
            message(f"warning: {line}")
    refuse_leaks(splits, config)
    return splits


def refuse_leaks(splits: Splits, config: TrainConfig) -> None:
    """Raise a UsageError if a patient or slide is on several sides, unless the settings allow leaks."""
    leaks = splits.leaks() if splits.split_by in ("patient", "site", "slide") else []
    if leaks and not config.allow_leaks:
        raise UsageError(
            "the split leaks",
            found="; ".join(leaks[:3]) + ("; …" if len(leaks) > 3 else ""),
            expected="each patient and slide on one side",
            todo="split by patient, or pass --allow-leaks to train anyway"
            if splits.column is None
            else f"correct column {splits.column}, or pass --allow-leaks to train anyway",
        )


def _check_given(splits: Splits, config: PatchTrainConfig, sources: Sequence[SampleSource]) -> None:
    """Raise a UsageError unless given splits match the labels and patch filter of the settings."""
    labelling = config.labelling
    by_annotation = any(slide.labels is not None for slide in splits.slides)
    if splits.slides and by_annotation != (labelling.labels_from == "annotation"):
        raise UsageError(
            f"--splits {config.splits}", found=f"--labels-from {labelling.labels_from}",
            expected=f"--labels-from {'annotation' if by_annotation else 'slide'}, the source of its labels",
        )  # fmt: skip
    for slide in splits.slides if labelling.patch_filter.active else ():
        where = f"{sources[slide.store].path}, slide {slide.id}"
        fit = labelling.patch_filter.fit(sources[slide.store].index(slide.slide), where=where)
        lost = int(((slide.sides >= 0) & ~fit).sum())
        if lost:
            raise UsageError(
                f"--splits {config.splits} has patches that the filter options exclude",
                found=f"{lost} of slide {slide.id}", expected=str(labelling.patch_filter),
                todo="create new splits, or remove the filter options",
            )  # fmt: skip


def find_participants(
    config: TrainConfig, sources: Sequence[SampleSource], splits: Splits
) -> list[Participant]:
    """Return all slides of the sources, each with its side or the reason of its exclusion.

    An existing split has the labels of its slides, so a labels file that is missing is only reported.
    """
    from_file = config.splits is not None
    first = sources[0]
    if isinstance(first, BagSet):
        if config.labels is not None:
            _check_patients(config, splits, {bag.id: bag.patient for bag in first.bags.values()})
        return bag_participants(first, splits, given_splits=from_file)
    try:
        labelling = split_options(config, sources, notify=SilentProgress().message)["labelling"]
    except UsageError as error:
        message(f"warning: {run_folder.SLIDES} has no further columns of the labels file: {error}")
        labelling = config.labelling if isinstance(config, PatchTrainConfig) else Labelling()
    _check_patients(
        config,
        splits,
        {name: slide_label.patient for name, slide_label in (labelling.labels or {}).items()},
    )
    return participants(sources, splits, labelling, given_splits=from_file)


def _check_patients(
    config: TrainConfig, splits: Splits, patients: Mapping[str, str | None]
) -> None:
    """Raise a UsageError if the labels file names another patient than the split: then it cannot show leaks."""
    for slide in splits.slides:
        patient = patients.get(slide.id)
        if patient is not None and nfc(patient) != nfc(slide.patient):
            raise UsageError(
                f"slide {slide.id} has another patient than in the split", found=f"{patient} in {config.labels}",
                expected=slide.patient, todo="create new splits, or use the labels file of the split",
            )  # fmt: skip


def split_options(
    config: TrainConfig,
    sources: Sequence[SampleSource],
    *,
    notify: Callable[[str], None] = message,
) -> dict[str, Any]:
    """Return the options of `make_splits` and `make_folds`. Bags already have labels, and are not split by region.

    `notify` as for `read_labels`.
    """
    labelling, region_um = Labelling(), 1.0
    if isinstance(config, PatchTrainConfig):
        labelling, region_um = config.labelling, config.region_um
        if config.labels is not None:
            labels = read_slide_labels(
                config.labels, sources, columns=config.target_columns, groups=config.further_columns,
                with_label=config.task == "classification", allow_extra=config.allow_extra_rows,
                na=config.na, notify=notify,
            )  # fmt: skip
            labelling = replace(labelling, labels=labels)
    if config.labels is None:
        _warn_of_recorded(sources, notify)
    labelling = replace(
        labelling, task=make_task(config.task, config.target_columns),
        covariates=getattr(config, "covariates", ()), split_column=config.split_column,
    )  # fmt: skip
    return {
        "split_by": config.split_by,
        "seed": config.seed,
        "labelling": labelling,
        "fractions": config.fractions,
        "region": Micrometres(region_um),
    }
