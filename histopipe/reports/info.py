"""Show the contents of a folder: a store, or the results of a command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.errors import NothingToDo
from histopipe.evaluation.evaluate import Evaluation, evaluation_lines, split_lines
from histopipe.features.feature_file import check_features, feature_files, read_header
from histopipe.inference.external_evaluation import read_evaluation
from histopipe.maintenance.info import StoreInfo, store_info
from histopipe.predictions.sources import SETTINGS, SLIDES
from histopipe.runs import folder as run_folder
from histopipe.runs.result import is_finished, read_result
from histopipe.runs.task_config import BagTrainConfig, PatchTrainConfig, load_config
from histopipe.splits.splits import SPLITS
from histopipe.splits.subsets import SUBSETS
from histopipe.studies.tune import TRIALS_CSV
from histopipe.system.csv_files import read_dicts
from histopipe.system.files import read_json_object
from histopipe.system.folders import ENCODER, FolderKind, folder_kind
from histopipe.system.output import Progress, Result


@dataclass(frozen=True, slots=True, repr=False)
class FolderInfo(Result):
    """The contents of a folder of results.

    Attributes:
        path: the folder.
        kind: kind of the folder: a run, a cross-validation, a search, predictions or features.
        finished: whether the command that wrote the folder has finished.
        facts: contents of the folder, by name.
        table: lines of metrics, if there are any.
        then: arguments of the `histopipe` command that continues or uses the folder.
    """

    path: str
    kind: FolderKind
    finished: bool
    facts: dict[str, Any]
    table: tuple[str, ...]
    then: tuple[str, ...]

    def __str__(self) -> str:
        width = max(map(len, self.facts))
        facts = [f"{name:<{width}}  {_text(value)}" for name, value in self.facts.items()]
        state = "" if self.finished else ", not finished"
        return "\n".join([f"{self.path}  ({self.kind}{state})", *facts, *self.table])


def info(
    path: str | Path, *, untrusted: bool = False, progress: Progress | None = None
) -> StoreInfo | FolderInfo:
    """Show the contents of a folder: a store, a run, a cross-validation, a search, predictions or features.

    Args:
        path: the folder.
        untrusted: verify a store before LMDB opens it, and feature files before HDF5 opens them.
        progress: shows the progress of the verification.

    Raises:
        NothingToDo: the folder contains none of these.
        DamagedStore, UnknownVersion: the folder cannot be read.
        UsageError: the configuration of a run cannot be read.

    Example:
        >>> info("patches.lmdb").patches  # doctest: +SKIP
        1204
    """
    folder = Path(path)
    kind = folder_kind(folder)
    if kind in _READERS:
        if untrusted and kind is FolderKind.FEATURES:
            check_features(folder)
        return _READERS[kind](folder)
    if kind is None:
        raise NothingToDo(
            f"nothing to show in {folder}",
            found="a folder" if folder.is_dir() else "no folder",
            expected="a store, a run, a cross-validation, a search, predictions or features",
            todo="check the path",
        )
    return store_info(folder, untrusted=untrusted, progress=progress)


def _run(folder: Path) -> FolderInfo:
    facts, finished = _training_facts(folder), is_finished(folder)
    if not finished:
        done = len(_rows(folder / run_folder.HISTORY))
        facts["epochs"] = f"{done} of {load_config(folder / run_folder.CONFIG).epochs}"
        todo = ("train", "--resume", "--out", str(folder))
        return FolderInfo(str(folder), FolderKind.RUN, False, facts, (), todo)
    result = read_result(folder)
    facts["epochs"] = f"{result.epochs} (best: {result.best_epoch})"
    lines = tuple(split_lines(result.metrics))
    return FolderInfo(str(folder), FolderKind.RUN, True, facts, lines, ("report", str(folder)))


def _training_facts(folder: Path) -> dict[str, Any]:
    """Return the settings that identify a training."""
    config = load_config(folder / run_folder.CONFIG)
    splits = read_json_object(folder / SPLITS)
    facts: dict[str, Any] = {}
    if isinstance(config, BagTrainConfig):
        facts = {"model": f"{config.pooling} (bags)", "features": ", ".join(config.mil)}
    elif isinstance(config, PatchTrainConfig):
        facts = {"model": config.model, "stores": config.stores}
    return facts | {
        "classes": splits.get("classes", ()),
        "split by": config.split_by,
        "slides": len(splits.get("slides", ())),
        **{subset: counts for subset, counts in splits.get("counts", {}).items() if counts},
    }


def _cross_validation(folder: Path) -> FolderInfo:
    runs = [path for path in sorted(folder.glob("fold-*")) if run_folder.has_begun(path)]
    done = [path for path in runs if is_finished(path)]
    folds = len(list((folder / run_folder.FOLD_SPLITS).iterdir()))
    facts: dict[str, Any] = {"folds": f"{folds}, {len(done)} finished"}
    if runs:
        facts |= {n: v for n, v in _training_facts(runs[0]).items() if n not in SUBSETS}
    summary, lines = folder / "summary.json", []
    if summary.exists():
        results = read_json_object(summary)
        for name, mean in results["mean"].items():
            if name.endswith(("_auc", "_balanced_accuracy")):
                facts[f"mean {name}"] = f"{mean:.3f} ± {results['deviation'].get(name, 0.0):.3f}"
        if results["pooled"]:
            lines = evaluation_lines("all folds together", Evaluation.from_json(results["pooled"]))
    finished = len(done) == folds
    resume = ("train", "--resume", "--out", str(folder))
    todo = ("compare", str(folder), "OTHER") if finished else resume
    return FolderInfo(str(folder), FolderKind.CROSS_VALIDATION, finished, facts, tuple(lines), todo)


def _search(folder: Path) -> FolderInfo:
    trials = _rows(folder / TRIALS_CSV)
    facts: dict[str, Any] = {"trials": len(trials), **Counter(row["state"] for row in trials)}
    values = [float(row["value"]) for row in trials if row["value"]]
    if values:
        facts["values"] = f"{min(values):.4f} to {max(values):.4f}"
    best = folder / "best.toml"
    todo = ("train", "--config", str(best)) if best.exists() else ()
    return FolderInfo(str(folder), FolderKind.SEARCH, bool(trials), facts, (), todo)


def _predictions(folder: Path) -> FolderInfo:
    settings, slides = read_json_object(folder / SETTINGS), _rows(folder / SLIDES)
    facts = {
        "run": settings.get("run"),
        "classes": settings.get("classes", ()),
        "slides": len(slides),
        "patches": sum(int(row["patches"]) for row in slides),
        "predicted": dict(Counter(row["predicted"] for row in slides)),
    }
    lines: list[str] = []
    external = read_evaluation(folder)
    if external is not None:
        lines = evaluation_lines("labelled", external.evaluation)
    finished = (folder / SLIDES).exists()
    return FolderInfo(
        str(folder), FolderKind.PREDICTIONS, finished, facts, tuple(lines), ("heatmap", str(folder))
    )


def _features(folder: Path) -> FolderInfo:
    encoder = read_json_object(folder / ENCODER)
    headers = [read_header(path) for path in feature_files(folder).values()]
    facts = {
        "encoder": encoder.get("encoder"),
        "dimension": encoder.get("dimension"),
        "precision": encoder.get("precision"),
        "stain normalization": encoder.get("stain_norm"),
        "slides": len(headers),
        "patches": sum(header.rows for header in headers),
    }
    todo = ("train", "--mil", str(folder))
    return FolderInfo(str(folder), FolderKind.FEATURES, bool(headers), facts, (), todo)


_READERS: Mapping[FolderKind | None, Callable[[Path], FolderInfo]] = {
    FolderKind.RUN: _run,
    FolderKind.CROSS_VALIDATION: _cross_validation,
    FolderKind.SEARCH: _search,
    FolderKind.PREDICTIONS: _predictions,
    FolderKind.FEATURES: _features,
}
"""Function that reads a folder of each kind."""


def _rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, or an empty list if the file does not exist yet."""
    try:
        return list(read_dicts(path))
    except FileNotFoundError:
        return []


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
