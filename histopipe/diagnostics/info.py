"""Show the contents of a folder: a store, or the results of a command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.errors import NothingToDo
from histopipe.evaluation.evaluate import Evaluation, evaluation_lines, fold_lines, split_lines
from histopipe.features.feature_file import feature_files, read_header
from histopipe.features.feature_sets import check_features
from histopipe.maintenance.store_info import StoreInfo, store_info
from histopipe.predicting.external_evaluation import read_evaluation
from histopipe.predictions.sources import SETTINGS, SLIDES
from histopipe.runs import folder as run_folder
from histopipe.runs.run import Run
from histopipe.search.tune import TRIALS_CSV
from histopipe.splits.splits import SPLITS
from histopipe.studies.probe import read_probe
from histopipe.system.files import read_json_object
from histopipe.system.folders import ENCODER, FolderKind, folder_kind
from histopipe.system.output import Progress, Result
from histopipe.system.table_files import read_dicts
from histopipe.tasks.choices import SUBSETS


@dataclass(frozen=True, slots=True, repr=False)
class FolderInfo(Result):
    """The contents of a folder of results.

    Attributes:
        path: the folder.
        kind: kind of the folder: a run, a cross-validation, a search, predictions, features or probes.
        finished: whether the command that wrote the folder has finished.
        facts: contents of the folder, by name.
        table: lines of metrics, if there are any.
        then: arguments of the `histopipe` command that continues or uses the folder.
    """

    path: str
    kind: FolderKind
    finished: bool
    facts: dict[str, Any]
    table: Sequence[str]
    then: tuple[str, ...]

    def __str__(self) -> str:
        width, state = max(map(len, self.facts)), "" if self.finished else ", not finished"
        contents = [f"{name:<{width}}  {_text(value)}" for name, value in self.facts.items()]
        return "\n".join([f"{self.path}  ({self.kind}{state})", *contents, *self.table])


def info(
    path: str | Path, *, untrusted: bool = False, progress: Progress | None = None
) -> StoreInfo | FolderInfo:
    """Show the contents of a folder: a store, a run, a cross-validation, a search, predictions, features or probes.

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
    if kind is None:
        raise NothingToDo(
            f"nothing to show in {folder}",
            found="a folder" if folder.is_dir() else "no folder",
            expected="a store, a run, a cross-validation, a search, predictions, features or probes",
            todo="check the path",
        )
    if kind not in _READERS:
        return store_info(folder, untrusted=untrusted, progress=progress)
    if untrusted and kind is FolderKind.FEATURES:
        check_features(folder)
    return FolderInfo(str(folder), kind, *_READERS[kind](folder))


_Contents = tuple[bool, dict[str, Any], Sequence[str], tuple[str, ...]]
"""Fields of `FolderInfo` after the kind: `finished`, `facts`, `table` and `then`."""


def _read_run(folder: Path) -> _Contents:
    run = Run(folder)
    contents, path = _describe_training(run), str(folder)
    if not run.is_finished:
        contents["epochs"] = f"{len(_rows(folder / run_folder.HISTORY))} of {run.config.epochs}"
        return False, contents, (), ("train", "--resume", "--out", path)
    result = run.result
    contents["epochs"] = f"{result.epochs} (best: {result.best_epoch})"
    return True, contents, split_lines(result.metrics), ("report", path)


def _describe_training(run: Run) -> dict[str, Any]:
    """Return the settings that identify a training."""
    values, splits = run.config.values(), read_json_object(run.folder / SPLITS)
    model = (
        {"model": f"{values['pooling']} (bags)", "features": ", ".join(values["mil"])}
        if "pooling" in values
        else {"model": values["model"], "stores": values["stores"]}
    )
    return {
        **model,
        "classes": splits.get("classes", ()),
        "split by": values["split_by"],
        "slides": len(splits.get("slides", ())),
        **{subset: counts for subset, counts in splits.get("counts", {}).items() if counts},
    }


def _read_cross_validation(folder: Path) -> _Contents:
    runs = run_folder.runs_of(folder)
    done, path, folds = sum(Run(run).is_finished for run in runs), str(folder), len(runs)
    contents: dict[str, Any] = {"folds": f"{folds}, {done} finished"}
    for run in filter(run_folder.has_begun, runs[:1]):
        contents |= {n: v for n, v in _describe_training(Run(run)).items() if n not in SUBSETS}
    summary, lines = folder / "summary.json", list[str]()
    if summary.exists():
        results = read_json_object(summary)
        contents |= {
            f"mean {name}": f"{mean:.3f} ± {results['deviation'].get(name, 0.0):.3f}"
            for name, mean in results["mean"].items()
            if name.endswith(("_auc", "_balanced_accuracy"))
        }
        if results["pooled"]:
            pooled = Evaluation.from_json(results["pooled"])
            lines = (
                fold_lines(Evaluation.from_json(results["within_folds"]), pooled)
                if results.get("within_folds")
                else evaluation_lines("all folds together", pooled)
            )
    then = ("compare", path, "OTHER") if done == folds else ("train", "--resume", "--out", path)
    return done == folds, contents, lines, then


def _read_search(folder: Path) -> _Contents:
    trials, best = _rows(folder / TRIALS_CSV), folder / "best.toml"
    contents: dict[str, Any] = {"trials": len(trials), **Counter(row["state"] for row in trials)}
    values = [float(row["value"]) for row in trials if row["value"]]
    if values:
        contents["values"] = f"{min(values):.4f} to {max(values):.4f}"
    return bool(trials), contents, (), ("train", "--config", str(best)) if best.exists() else ()


def _read_predictions(folder: Path) -> _Contents:
    settings, slides = read_json_object(folder / SETTINGS), _rows(folder / SLIDES)
    contents = {
        "run": settings.get("run"),
        "classes": settings.get("classes", ()),
        "slides": len(slides),
        "patches": sum(int(row["patches"]) for row in slides),
    }
    if slides and "predicted" in slides[0]:  # not of numbers, labels and times
        contents["predicted"] = dict(Counter(row["predicted"] for row in slides))
    external = read_evaluation(folder)
    lines = () if external is None else evaluation_lines("labelled", external.evaluation)
    return (folder / SLIDES).exists(), contents, lines, ("heatmap", str(folder))


def _read_features(folder: Path) -> _Contents:
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
    return bool(headers), contents, (), ("train", "--mil", str(folder))


def _read_probes(folder: Path) -> _Contents:
    result = read_probe(folder)
    contents = {"feature sets": [*result.sets], "bags": result.items, "patients": result.patients}
    return True, contents, result.table(), ("report", str(folder))


_READERS: Mapping[FolderKind, Callable[[Path], _Contents]] = {
    FolderKind.RUN: _read_run,
    FolderKind.CROSS_VALIDATION: _read_cross_validation,
    FolderKind.SEARCH: _read_search,
    FolderKind.PREDICTIONS: _read_predictions,
    FolderKind.FEATURES: _read_features,
    FolderKind.PROBES: _read_probes,
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
