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
from histopipe.maintenance.store_info import StoreInfo, store_info
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
        contents = [f"{name:<{width}}  {_text(value)}" for name, value in self.facts.items()]
        state = "" if self.finished else ", not finished"
        return "\n".join([f"{self.path}  ({self.kind}{state})", *contents, *self.table])


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
    contents, path = _describe_training(folder), str(folder)
    if not is_finished(folder):
        done = len(_rows(folder / run_folder.HISTORY))
        contents["epochs"] = f"{done} of {load_config(folder / run_folder.CONFIG).epochs}"
        return FolderInfo(
            path, FolderKind.RUN, False, contents, (), ("train", "--resume", "--out", path)
        )
    result = read_result(folder)
    contents["epochs"] = f"{result.epochs} (best: {result.best_epoch})"
    lines = tuple(split_lines(result.metrics))
    return FolderInfo(path, FolderKind.RUN, True, contents, lines, ("report", path))


def _describe_training(folder: Path) -> dict[str, Any]:
    """Return the settings that identify a training."""
    config = load_config(folder / run_folder.CONFIG)
    splits = read_json_object(folder / SPLITS)
    model: dict[str, Any] = {}
    if isinstance(config, BagTrainConfig):
        model = {"model": f"{config.pooling} (bags)", "features": ", ".join(config.mil)}
    elif isinstance(config, PatchTrainConfig):
        model = {"model": config.model, "stores": config.stores}
    return {
        **model,
        "classes": splits.get("classes", ()),
        "split by": config.split_by,
        "slides": len(splits.get("slides", ())),
        **{subset: counts for subset, counts in splits.get("counts", {}).items() if counts},
    }


def _cross_validation(folder: Path) -> FolderInfo:
    runs = [path for path in sorted(folder.glob("fold-*")) if run_folder.has_begun(path)]
    done = sum(map(is_finished, runs))
    folds = len(list((folder / run_folder.FOLD_SPLITS).iterdir()))
    contents: dict[str, Any] = {"folds": f"{folds}, {done} finished"}
    for run in runs[:1]:
        contents |= {n: v for n, v in _describe_training(run).items() if n not in SUBSETS}
    summary, lines = folder / "summary.json", []
    if summary.exists():
        results = read_json_object(summary)
        for name, mean in results["mean"].items():
            if name.endswith(("_auc", "_balanced_accuracy")):
                contents[f"mean {name}"] = f"{mean:.3f} ± {results['deviation'].get(name, 0.0):.3f}"
        if results["pooled"]:
            lines = evaluation_lines("all folds together", Evaluation.from_json(results["pooled"]))
    path, finished = str(folder), done == folds
    todo = ("compare", path, "OTHER") if finished else ("train", "--resume", "--out", path)
    return FolderInfo(path, FolderKind.CROSS_VALIDATION, finished, contents, tuple(lines), todo)


def _search(folder: Path) -> FolderInfo:
    trials, best = _rows(folder / TRIALS_CSV), folder / "best.toml"
    contents: dict[str, Any] = {"trials": len(trials), **Counter(row["state"] for row in trials)}
    values = [float(row["value"]) for row in trials if row["value"]]
    if values:
        contents["values"] = f"{min(values):.4f} to {max(values):.4f}"
    todo = ("train", "--config", str(best)) if best.exists() else ()
    return FolderInfo(str(folder), FolderKind.SEARCH, bool(trials), contents, (), todo)


def _predictions(folder: Path) -> FolderInfo:
    settings, slides = read_json_object(folder / SETTINGS), _rows(folder / SLIDES)
    contents = {
        "run": settings.get("run"),
        "classes": settings.get("classes", ()),
        "slides": len(slides),
        "patches": sum(int(row["patches"]) for row in slides),
        "predicted": dict(Counter(row["predicted"] for row in slides)),
    }
    external = read_evaluation(folder)
    lines = () if external is None else evaluation_lines("labelled", external.evaluation)
    finished, path = (folder / SLIDES).exists(), str(folder)
    return FolderInfo(
        path, FolderKind.PREDICTIONS, finished, contents, tuple(lines), ("heatmap", path)
    )


def _features(folder: Path) -> FolderInfo:
    encoder = read_json_object(folder / ENCODER)
    headers = [read_header(path) for path in feature_files(folder).values()]
    contents = {
        "encoder": encoder.get("encoder"),
        "dimension": encoder.get("dimension"),
        "precision": encoder.get("precision"),
        "stain normalization": encoder.get("stain_norm"),
        "slides": len(headers),
        "patches": sum(header.rows for header in headers),
    }
    path = str(folder)
    todo = ("train", "--mil", path)
    return FolderInfo(path, FolderKind.FEATURES, bool(headers), contents, (), todo)


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
    return list(read_dicts(path)) if path.exists() else []


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
