"""How a training's patches are divided: read where that is given, else made. TensorFlow is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from histopipe.dataset.labelling import Labelling, read_slide_labels
from histopipe.dataset.samples import SampleSource
from histopipe.dataset.selection import store_paths
from histopipe.dataset.splits import Splits, read_splits, recorded_numbers
from histopipe.dataset.splitting import make_folds, make_splits
from histopipe.errors import UsageError
from histopipe.features.bag_set import BagSet
from histopipe.geometry import Micrometres
from histopipe.runs import folder as run_folder
from histopipe.runs.config import TrainConfig
from histopipe.store.store import Store, check_patch_sizes


@contextmanager
def opened_sources(
    config: TrainConfig, splits: str | Path | None = None
) -> Iterator[Sequence[SampleSource]]:
    """What a training learns from: its stores, or its bags.

    Args:
        config: the settings.
        splits: the file of splits that will be read, if one will be.

    Raises:
        HistopipeError: they cannot be read, or do not fit together.
    """
    if config.mil is not None:
        labels = None if config.labels is None else Path(config.labels)
        yield [
            BagSet(
                Path(config.mil),
                bag=config.bag,
                labels=labels,
                allow_extra=config.allow_extra_rows,
                numbers=None if splits is None else recorded_numbers(Path(splits)),
            )
        ]
        return
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(path)) for path in store_paths(config.stores)]
        check_patch_sizes(stores)
        yield stores


def run_splits(
    config: TrainConfig, sources: Sequence[SampleSource], folder: Path, *, resume: bool
) -> Splits:
    """The run's splits: read if it goes on, else as its settings say."""
    return (
        read_splits(folder / run_folder.SPLITS, sources) if resume else new_splits(config, sources)
    )


def new_splits(config: TrainConfig, sources: Sequence[SampleSource]) -> Splits:
    """Splits as the settings say: read if they are given, else made.

    Raises:
        UsageError: a patient or slide is on several sides.
    """
    if config.splits is not None:
        splits = read_splits(Path(config.splits), sources)
        _check_given(splits, config, sources)
    else:
        splits = make_splits(
            sources,
            split_by=config.split_by,
            seed=config.seed,
            labelling=_labelling(config, sources),
            fractions=_three(config.fractions),
            region=Micrometres(config.region_um),
        )
    leaks = splits.leaks() if splits.split_by in ("patient", "site", "slide") else []
    if leaks and not config.allow_leaks:
        raise UsageError(
            "the split leaks",
            found="; ".join(leaks[:3]) + ("; …" if len(leaks) > 3 else ""),
            expected="each patient and slide on one side",
            todo="split by patient, or pass --allow-leaks if you mean it",
        )
    return splits


def _check_given(splits: Splits, config: TrainConfig, sources: Sequence[SampleSource]) -> None:
    """Refuse settings that splits which are given do not keep to.

    Raises:
        UsageError: they are of other labels, or have patches that bounds leave out.
    """
    drawn = any(slide.labels is not None for slide in splits.slides)
    if splits.slides and drawn != (config.labels_from == "annotation"):
        raise UsageError(
            f"--splits {config.splits}", found=f"--labels-from {config.labels_from}",
            expected=f"--labels-from {'annotation' if drawn else 'slide'}, as its labels are",
        )  # fmt: skip
    for slide in splits.slides if config.patch_filter.active else ():
        where = f"{sources[slide.store].path}, slide {slide.id}"
        fit = config.patch_filter.fit(sources[slide.store].index(slide.slide), where=where)
        lost = int(((slide.sides >= 0) & ~fit).sum())
        if lost:
            raise UsageError(
                f"--splits {config.splits} has patches that the bounds would leave out",
                found=f"{lost} of slide {slide.id}", expected=str(config.patch_filter),
                todo="make new splits, or leave the bounds out",
            )  # fmt: skip


def new_folds(
    config: TrainConfig, sources: Sequence[SampleSource], folds: int
) -> tuple[Splits, ...]:
    """Splits for each fold of a cross-validation, as the settings say."""
    return make_folds(
        sources,
        folds,
        split_by=config.split_by,
        seed=config.seed,
        labelling=_labelling(config, sources),
        fractions=_three(config.fractions),
        region=Micrometres(config.region_um),
    )


def _labelling(config: TrainConfig, sources: Sequence[SampleSource]) -> Labelling:
    """Where labels come from: bags were made with theirs."""
    labels = None
    if config.mil is None and config.labels is not None:
        labels = read_slide_labels(config.labels, sources, allow_extra=config.allow_extra_rows)
    return Labelling(
        labels=labels, labels_from=config.labels_from, patch_filter=config.patch_filter
    )


def _three(fractions: tuple[float, ...]) -> tuple[float, float, float]:
    first, second, third = fractions
    return first, second, third
