"""Write the file of a study: the settings of its commands, a table for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.pretrained.encoders import named_preset
from histopipe.runs.task_config import CONFIGS, make_config
from histopipe.studies.init_settings import INIT, INIT_CLASSES
from histopipe.studies.study_settings import FoldSettings
from histopipe.system.files import writable, write_atomically
from histopipe.system.output import Result
from histopipe.system.settings import declared_settings, read_arguments, takes
from histopipe.system.table_cells import refuse_unclear_event
from histopipe.tiling.spec import TilingSpec


@dataclass(frozen=True, repr=False)
class InitResult(Result):
    """Result of `init`: the file, and the commands that take it, in their order."""

    file: Path
    commands: tuple[str, ...]

    def __str__(self) -> str:
        lines = (f"histopipe {name} --config {self.file}" for name in self.commands)
        return "\n".join([str(self.file), *lines])


@takes({name: declared_settings(*INIT_CLASSES)[name] for name in INIT})
def init(
    out: str | Path = "histopipe.toml",
    *,
    slides: Sequence[str | Path] = ("slides",),
    new_slides: Sequence[str | Path] = ("new-slides",),
    encoder: str | None = None,
    weights: str | Path | None = None,
    **settings: Any,
) -> InitResult:
    """Write a file with the settings of a study, which each command takes by `--config`.

    Without an encoder, the study trains a patch model, else a slide model on features.

    Args:
        out: the file.
        slides: folders or files of slides to train on.
        new_slides: folders or files of slides to predict.
        encoder: encoder of a slide model, as for `embed`.
        weights: file or folder of its weights.
        settings: options by name, as in docs/reference/settings.md: labels, patch_size, mpp, task, target, time, event,
            folds.

    Returns:
        The file, and the commands.

    Raises:
        UsageError: the file exists, or an option is wrong.

    Example:
        >>> init(labels="labels.csv", folds=5).commands  # doctest: +SKIP
        ('ingest', 'train', 'report', 'predict', 'heatmap')
    """
    declared = declared_settings(*INIT_CLASSES)
    values = read_arguments(settings, {name: declared[name] for name in INIT})
    of_task = {name: values[name] for name in ("task", *_TARGETS) if name in values}
    needs_encoder = {"--task survival": of_task.get("task") == "survival", "--weights": weights}
    flags = [flag for flag, is_set in needs_encoder.items() if is_set]
    if encoder is None and flags:
        raise UsageError(flags[0], found="no --encoder", expected="--encoder of a slide model")
    FoldSettings(folds=values.get("folds", 0))  # checks them, as the next line does the task
    refuse_unclear_event(of_task.get("event"))
    make_config({**of_task, "labels": "labels.csv", "mil": ["features"] if encoder else None})
    path = Path(out)
    if path.exists():
        raise UsageError(f"{path} exists", todo="remove it, or choose another --out")
    tables = dict(_tables(values, slides, new_slides, encoder, weights))
    lines = [
        "# The settings of a study, a table for each command: histopipe ingest --config FILE, and so on.",
        "# Flags override this file. Paths are relative to its folder. Lines with # are suggestions.",
        "# All settings: histopipe COMMAND --help",
    ]
    for command, entries in tables.items():
        lines += ["", f"[{command}]"]
        lines += [
            f"{'# ' if value is None else ''}{key} = {_toml(value, comment)}"
            for key, (value, comment) in entries.items()
        ]
    with writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "\n".join([*lines, ""]))
    return InitResult(path, tuple(tables))


def _toml(value: Any, comment: str) -> str:
    """Return a value as TOML, with a comment; without a value, the comment has an example."""
    if value is None:
        return comment
    value = [*map(str, value)] if isinstance(value, list | tuple) else value
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return f"{text}  # {comment}" if comment else text


ValueWithComment = tuple[Any, str]
_TARGETS = ("target", "time", "event", "censored")


def _tables(
    values: Mapping[str, Any],
    slides: Sequence[str | Path],
    new_slides: Sequence[str | Path],
    encoder: str | None,
    weights: str | Path | None,
) -> Iterator[tuple[str, dict[str, ValueWithComment]]]:
    """Yield each command with its settings: value and comment, or None and an example with a comment."""
    of_classes = values.get("task", "classification") == "classification"
    labels = values.get("labels")
    by_labels: ValueWithComment = (
        (labels, "columns slide, label, and patient if patients have several slides")
        if labels
        else (None, '"labels.csv"')
    )
    side, mpp = _patches_of(encoder)
    yield (
        "ingest",
        {
            "slides": (slides, ""),
            "out": ("patches.lmdb", ""),
            "patch_size": (values.get("patch_size", side), "pixels"),
            "mpp": (values.get("mpp", mpp) or 0.5, "µm per pixel"),
            **({"labels": by_labels} if of_classes else {}),
        },
    )
    if encoder is not None:
        yield (
            "embed",
            {
                "sources": (["patches.lmdb"], ""),
                "out": ("features", ""),
                "model": ([encoder], "a name of `histopipe encoders`, or a file"),
                "weights": ([weights], "") if weights else (None, '["weights/"]'),
            },
        )
    yield "train", _training(values, of_bags=encoder is not None)
    yield "report", {"paths": (["runs/study"], "")}
    yield (
        "predict",
        {
            "run": ("runs/study", ""),
            "sources": (new_slides, "slides, or stores"),
            "out": ("predictions", ""),
            "labels": (None, '"new-labels.csv"  # to report metrics'),
        },
    )
    yield (
        "heatmap",
        {
            "predictions": ("predictions", ""),
            "out": ("heatmaps", ""),
            "slides": (new_slides, "for finer images"),
            "to": (["png"], "png, tiff, geojson"),
        },
    )


def _training(values: Mapping[str, Any], *, of_bags: bool) -> dict[str, ValueWithComment]:
    of_classes = values.get("task", "classification") == "classification"
    of_targets: dict[str, ValueWithComment] = {
        "task": (values.get("task"), ""),
        "labels": (
            values.get("labels") or "labels.csv",
            "columns slide, patient, and those of the target",
        ),
    }
    folds = values.get("folds")
    return {
        **({"mil": (["features"], "")} if of_bags else {"stores": (["patches.lmdb"], "")}),
        "out": ("runs/study", ""),
        **({} if of_classes else of_targets),
        **{name: (values[name], "") for name in _TARGETS if values.get(name)},
        "folds": (folds, "") if folds else (None, "5  # cross-validation"),
        "epochs": (None, f"{declared_settings(CONFIGS[of_bags])['epochs'].default}"),
        "seed": (1, ""),
    }


def _patches_of(encoder: str | None) -> tuple[int, float | None]:
    """Return side and scale of the patches for an encoder: those that it was trained on, if they are known."""
    preset = named_preset(encoder) if encoder else None
    if preset is not None:
        return preset.preprocessing.resized, next(iter(preset.mpp), None)
    return declared_settings(TilingSpec)["patch_size"].default, None
