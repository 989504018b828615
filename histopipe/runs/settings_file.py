"""Settings from files and keywords, and which of them a run may change when it goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from histopipe.errors import UsageError
from histopipe.runs.config import BAG_DEFAULTS, TrainConfig
from histopipe.runs.setting_checks import fits, flag, like
from histopipe.system.files import read_toml

MAY_CHANGE = (
    "epochs", "patience", "devices", "on_error", "accumulate", "save_minutes", "tensorboard",
    "communication", "worker_timeout", "log_device_placement",
    "positive", "threshold", "top_k", "resamples",
)  # fmt: skip
"""Settings that may change in the middle of a run: what was trained so far stays meaningful."""


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings, lists as tuples and paths as texts; where bags are learnt from, with the defaults of that.

    Raises:
        UsageError: there is no such setting.
    """
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    unknown = sorted(set(settings) - names)
    if unknown:
        raise UsageError(
            "unknown settings", found=", ".join(unknown), expected=", ".join(sorted(names))
        )
    defaults = BAG_DEFAULTS if settings.get("mil") is not None else {}
    given = {
        name: tuple(value)
        if isinstance(value, list)
        else str(value)
        if isinstance(value, Path)
        else value
        for name, value in settings.items()
    }
    return {**defaults, **given}


def resumed(folder: Path, changes: dict[str, Any]) -> TrainConfig:
    """A run's own settings, and what is to change.

    Raises:
        UsageError: the folder holds no run, or the change would make what was trained so far meaningless.
    """
    path = folder / "config.toml"
    if not path.is_file():
        raise UsageError(
            f"no run to resume in {folder}", expected="the folder of a run, with its config.toml"
        )
    return changed(read_config(path), changes)


def changed(recorded: dict[str, Any], changes: dict[str, Any]) -> TrainConfig:
    """Recorded settings of a training, and what is to change.

    Raises:
        UsageError: the change would make what was trained so far meaningless.
    """
    refused = [
        "STORES" if name == "stores" else flag(name)
        for name, value in changes.items()
        if name not in MAY_CHANGE and known({name: value}) != known({name: recorded.get(name)})
    ]
    if refused:
        raise UsageError(
            "--resume goes on with the run's own settings", found=", ".join(refused),
            expected="only --out and " + ", ".join(flag(name) for name in MAY_CHANGE),
        )  # fmt: skip
    return TrainConfig(**known(recorded | changes))


def read_config(path: Path, *kinds: type[Any]) -> dict[str, Any]:
    """Settings from a TOML file.

    Args:
        path: the file.
        kinds: dataclasses with defaults, whose fields may be named; that of a training if none is given.

    Raises:
        UsageError: the file cannot be read, or names something else.
    """
    try:
        values = read_toml(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error), expected="TOML") from error
    fields = {f.name: f for kind in kinds or (TrainConfig,) for f in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UsageError(
            f"{path}: unknown settings",
            found=", ".join(unknown),
            expected=", ".join(sorted(fields)),
        )
    for name, value in values.items():
        if not fits(value, fields[name].default):
            raise UsageError(f"{path}: {name}", found=repr(value), expected=like(fields[name]))
    return values
