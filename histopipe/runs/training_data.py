"""The data of a training and its split into training, validation and test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from histopipe.annotations.rules import PixelRules
from histopipe.cohorts.cohort import with_cohort
from histopipe.dataset.bags import BagSet
from histopipe.dataset.patch_masks import COPY, check_copy, open_stores
from histopipe.dataset.selection import store_paths
from histopipe.errors import UsageError
from histopipe.evaluation.prediction_sets import check_calibration
from histopipe.geometry import Micrometres
from histopipe.predictions.sources import AREAS, SLIDES
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig
from histopipe.slides.slide_files import SlideNames
from histopipe.slides.tables import SlideLabel, read_labels
from histopipe.splits.labelling import Labelling, read_slide_labels
from histopipe.splits.slide_table import (
    SlideEntry,
    leaked_patients,
    read_slide_table,
    table_of,
)
from histopipe.splits.splits import (
    SPLITS,
    SampleSource,
    Splits,
    load_splits,
    read_splits,
    recorded_numbers,
)
from histopipe.splits.splitting import make_splits, part_of_training
from histopipe.store.format import STAIN_TABLE
from histopipe.system.files import reading
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.output import Progress, message, some
from histopipe.system.settings import make_settings, select_settings
from histopipe.system.table_cells import NA_VALUES, nfc, similar_values
from histopipe.system.table_files import read_dicts
from histopipe.tasks.choices import CALIBRATION, Subset
from histopipe.tasks.registry import make_task


@contextmanager
def opened_sources(
    config: TrainConfig, splits: str | Path | None = None, run: Path | None = None
) -> Iterator[Sequence[SampleSource]]:
    """Open the stores or the bags of a training. `splits` is the splits.json to be read, if any.

    Of a `run` that is resumed, masks are read from its copy of the annotations.

    Raises:
        HistopipeError: a source cannot be read, or sources do not fit together; or annotations differ from the copy.
    """
    if isinstance(config, BagTrainConfig):
        # All slides of a patient are in one subset, so that its bag is.
        columns = [
            *config.target_columns,
            *config.covariates,
            *filter(None, [config.split_column]),
        ]
        of_areas = [name for name in config.covariates if config.areas and AREAS.match(name)]
        columns = [name for name in columns if name not in of_areas]
        labels: Any = config.labels and partial(
            read_labels,
            Path(config.labels),
            columns=columns,
            groups=[name for name in config.further_columns if name not in columns],
            with_label=config.task_type.of_classes,
            allow_extra=config.allow_extra_rows,
            na=config.na,
            # An existing split has its labels: the training that made it has reported on the file.
            notify=message if splits is None else Progress().message,
        )
        if of_areas:
            labels = partial(_with_areas, labels, config, of_areas)
        yield [
            BagSet(
                [Path(folder) for folder in config.mil],
                bag=config.bag,
                labels=labels or None,
                columns=[*columns, *of_areas],
                on_error=config.on_error,
                numbers=None if splits is None else recorded_numbers(Path(splits)),
            )
        ]
    elif isinstance(config, PatchTrainConfig):
        rules, masks = (
            make_settings(PixelRules, select_settings(config.values(), PixelRules)),
            config.masks,
        )
        if masks is not None and run is not None:
            check_copy(run / COPY, Path(masks), rules)
            masks = str(run / COPY)
        classes = None if masks is None or splits is None else load_splits(Path(splits)).classes
        with ExitStack() as stack:
            yield open_stores(
                store_paths(config.stores), masks, rules, stack=stack, classes=classes
            )


def _with_areas(
    read: Callable[[SlideNames], Mapping[str, SlideLabel]],
    config: BagTrainConfig,
    columns: Sequence[str],
    names: SlideNames,
) -> dict[str, SlideLabel]:
    """Return the rows of a labels file, with columns of predicted areas as further cells.

    Raises:
        UsageError: a column is missing, or slides are of patients that the segmentation was trained on.
    """
    rows, areas, leaked = read(names), dict[str, Mapping[str, str]](), set[str]()
    for folder in map(Path, config.areas):
        # Of a store, the table of `stains --amounts`, which no model has made.
        is_store = folder_kind(folder) is FolderKind.STORE
        table, source = (
            folder / (STAIN_TABLE if is_store else SLIDES),
            {"in_training": "no"} if is_store else {},
        )
        with reading(table, missing=UsageError(f"{table} does not exist")):
            for row in ({**source, **row} for row in read_dicts(table)):
                absent = [name for name in (*columns, "in_training") if name not in row]
                if absent:
                    raise UsageError(
                        f"{table}: column {absent[0]}",
                        expected=f"predictions of a segmentation, with columns such as {', '.join(row)}",
                    )
                slide = names.find(row["slide"], where=str(table)) or row["slide"]
                if row["in_training"] == "yes" and not config.allow_leaks:
                    leaked.add(slide)
                else:
                    areas.setdefault(slide, row)
    wrong = sorted(leaked & rows.keys() - areas.keys())
    if wrong:
        raise UsageError(
            "--areas",
            found=f"predictions of patients that the segmentation was trained on: slides {some(wrong, 3)}",
            expected="those of runs in whose test set each slide is, or that have not used its patient",
            todo="predict these slides by another fold, and name its folder, too; or pass --allow-leaks",
        )
    return {
        slide: replace(
            row,
            cells={**row.cells, **{name: areas.get(slide, {}).get(name, "") for name in columns}},
        )
        for slide, row in rows.items()
    }


def read_labelling(
    config: TrainConfig,
    sources: Sequence[SampleSource],
    *,
    required: bool = True,
) -> Labelling:
    """Return how slides are labelled, with the rows of the labels file. The labels of bags are in their source.

    Args:
        config: settings of the training.
        sources: the stores, or the bags.
        required: whether a split is made from the labels. An existing split has them; then a labels file that cannot be
            read is only reported, and remarks on the labels are not shown.
    """
    labelling = replace(
        config.labelling if isinstance(config, PatchTrainConfig) else Labelling(),
        task=make_task(config.task, config.target_columns),
        covariates=getattr(config, "covariates", ()),
        split_column=config.split_column,
    )
    notify = message if required else Progress().message
    if config.labels is None:
        _warn_of_recorded(sources, notify)
    elif isinstance(config, PatchTrainConfig):
        try:
            return replace(
                labelling,
                labels=read_slide_labels(
                    config.labels,
                    sources,
                    columns=config.target_columns,
                    groups=config.further_columns,
                    with_label=None if config.task_type.of_classes else False,
                    allow_extra=config.allow_extra_rows,
                    na=config.na,
                    notify=notify,
                ),
            )
        except UsageError as error:
            if required:
                raise
            message(
                f"warning: {run_folder.SLIDES} has no further columns of the labels file: {error}"
            )
    return labelling


def _warn_of_recorded(sources: Sequence[SampleSource], notify: Callable[[str], None]) -> None:
    """Warn of recorded names that are probably missing values, or that may be one name."""
    for what in ("label", "patient", "site"):
        names = {
            getattr(record, what) or "" for source in sources for record in source.records.values()
        }
        missing = [f"{name!r} is no missing value" for name in sorted(names & set(NA_VALUES))]
        for problem in filter(None, (*missing, similar_values(names))):
            notify(f"warning: recorded {what}: {problem}; --labels replaces it")


def splits_and_slides(
    config: TrainConfig, sources: Sequence[SampleSource], folder: Path, *, resume: bool
) -> tuple[Splits, list[SlideEntry]]:
    """Return the splits and the table of slides of a training; when it is resumed, those in its folder.

    Raises:
        UsageError, DamagedStore: see `new_splits` and `read_splits`.
    """
    recorded = read_slide_table(folder / run_folder.SLIDES) if resume else []
    # A run that has finished before has recorded damaged patches. They are counted again.
    if recorded and not any(slide.damaged for slide in recorded):
        return read_splits(folder / SPLITS, sources), recorded
    labelling = read_labelling(config, sources, required=config.splits is None and not resume)
    splits = (
        read_splits(folder / SPLITS, sources) if resume else new_splits(config, sources, labelling)
    )
    from_file = config.splits is not None
    slides = (
        sources[0].slide_table(splits, from_file=from_file)
        if isinstance(sources[0], BagSet)
        else table_of(sources, labelling, splits, from_file=from_file)
    )
    return splits, slides if config.labels is None else with_cohort(slides, config.labels, message)


def new_splits(
    config: TrainConfig, sources: Sequence[SampleSource], labelling: Labelling
) -> Splits:
    """Return the splits for a configuration: read from its file if it names one, else computed.

    Raises:
        UsageError: a patient or slide is in several subsets, the file does not fit the settings or the labels, or a
            setting needs validation slides, and there are none.
    """
    if config.splits is None:
        splits = make_splits(sources, **split_options(config, labelling))
        for line in splits.shortages(config.unit):
            message(f"warning: {line}")
    else:
        splits = read_splits(Path(config.splits), sources)
        _check_given(splits, config, sources, labelling)
    if config.conformal:
        if config.calibration_share and not splits.slides_on("calibration"):
            splits = part_of_training(splits, 1 - config.calibration_share, CALIBRATION)
        subset: Subset = "calibration" if config.calibration_share else "test"
        apart = splits.split_by in ("patient", "site") and not leaked_patients(splits)[subset]
        if not (apart and splits.slides_on(subset)):
            raise UsageError(
                "--conformal",
                found=f"a split by {splits.split_by}, in which {subset} is missing, or has patients of another subset",
                expected="a split by patient or site, with patients who only calibrate",
            )
        if config.splits is None or config.calibration_share:  # folds calibrate each other
            check_calibration([splits], subset, config.conformal)
    refuse_leaks(splits, config)
    if (config.calibrate or config.threshold.startswith("s")) and not splits.slides_on(
        "validation"
    ):
        raise UsageError(
            "--calibrate" if config.calibrate else f"--threshold {config.threshold}",
            found="a split without validation",
            expected="validation slides",
            todo="leave it out: the last epoch is kept, and the threshold is 0.5",
        )
    return splits


def refuse_leaks(splits: Splits, config: TrainConfig) -> None:
    """Raise a UsageError if a patient or slide is in several subsets, unless the settings allow leaks."""
    leaks = splits.leaks() if splits.split_by in ("patient", "site", "slide") else []
    if leaks and not config.allow_leaks:
        raise UsageError(
            "the split leaks",
            found="; ".join(leaks[:3]) + ("; …" if len(leaks) > 3 else ""),
            expected="each patient and slide in one subset, and each site with --split-by site",
            todo="split by patient, or pass --allow-leaks to train anyway"
            if splits.column is None
            else f"correct column {splits.column}, or pass --allow-leaks to train anyway",
        )


def _check_given(
    splits: Splits, config: TrainConfig, sources: Sequence[SampleSource], labelling: Labelling
) -> None:
    """Raise a UsageError unless splits of a file match the settings, the labels and the patch filter."""
    what = f"--splits {config.splits}"
    if config.split_column not in (None, splits.column):
        raise UsageError(
            f"{what} is not from --split-column {config.split_column}",
            todo="leave one of them out",
        )
    columns = (*config.target_columns, *labelling.covariates)
    columns_of_splits = (*splits.targets, *splits.covariates)
    if (splits.task_name, columns_of_splits) != (config.task, columns):
        raise UsageError(
            what,
            found=f"{splits.task_name} {' '.join(columns_of_splits)}",
            expected=f"{config.task} {' '.join(columns)}",
            todo="create new splits",
        )
    by_annotation = any(slide.labels is not None for slide in splits.slides)
    if splits.slides and by_annotation != (labelling.labels_from == "annotation"):
        raise UsageError(
            what,
            found=f"--labels-from {labelling.labels_from}",
            expected=f"--labels-from {'annotation' if by_annotation else 'slide'}, the source of its labels",
        )
    for slide in splits.slides:
        source = sources[slide.store]
        rows: Mapping[str, Any] = labelling.labels or {}
        row = source.records[slide.slide] if isinstance(source, BagSet) else rows.get(slide.id)
        # Patients of another labels file would hide leaks.
        if config.labels and row and row.patient and nfc(row.patient) != nfc(slide.patient):
            raise UsageError(
                f"slide {slide.id} has another patient than in the split",
                found=f"{row.patient} in {config.labels}",
                expected=slide.patient,
                todo="create new splits, or use the labels file of the split",
            )
        most, used = labelling.patches_per_slide, int((slide.subsets >= 0).sum())
        if most and used > most:
            raise UsageError(
                f"--patches-per-slide {most}",
                found=f"{used} patches of slide {slide.id} in {config.splits}",
                expected="splits with this setting",
                todo="create new splits, or leave it out",
            )
        if labelling.patch_filter.active:
            fit = labelling.patch_filter.fit(
                source.index(slide.slide), where=f"{source.path}, slide {slide.id}"
            )
            lost = int(((slide.subsets >= 0) & ~fit).sum())
            if lost:
                raise UsageError(
                    f"{what} has patches that the filter options exclude",
                    found=f"{lost} of slide {slide.id}",
                    expected=str(labelling.patch_filter),
                    todo="create new splits, or remove the filter options",
                )


def split_options(config: TrainConfig, labelling: Labelling) -> dict[str, Any]:
    """Return the options of `make_splits` and `make_folds`. Bags are not split by region."""
    return {
        "split_by": config.split_by,
        "seed": config.seed,
        "labelling": labelling,
        "fractions": config.fractions,
        "region": Micrometres(getattr(config, "region_um", 1.0)),
    }


def print_splits(splits: Splits, sources: Sequence[SampleSource], units: str, unit: str) -> None:
    """Print the samples per subset and class. `units` (see `TrainingSetup`) and `unit` are plural nouns."""
    for subset, counts in splits.count().items():
        message(f"{subset:<11}{splits.task.subset_text(splits.targets_on(subset), counts, unit)}")
    if splits.split_by == "patch":
        message(
            "warning: split by patch: test patches are neighbours of training patches, so test metrics"
        )
        message("show that the pipeline learns, not how good the model is on other slides")
    left_out = sum(len(source.complete) for source in sources) - len(splits.slides)
    if left_out:
        column = "" if splits.column is None else f", or no value in column {splits.column}"
        message(f"{left_out} {units} left out: no label, or no patches{column}")
    dropped = sum(int((slide.subsets < 0).sum()) for slide in splits.slides)
    if dropped:
        message(
            f"{dropped} {unit} left out (unreadable, no class, filtered out, more than --patches-per-slide, "
            "too near another subset, or held out from a search)"
        )
    slides = Counter((slide.site or "no site", slide.label) for slide in splits.slides)
    sites = sorted({site for site, _ in slides})
    if len(sites) > 1:
        message("slides by site and label:")
        for site in sites:
            message(f"  {site:<20}" + ", ".join(f"{slides[site, c]} {c}" for c in splits.classes))
