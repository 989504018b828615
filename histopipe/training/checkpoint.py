"""The resume state of a training: everything that the next epoch depends on, as one file that is whole or not there.

Our own npz, since Keras' formats leave out seeds and `tf.train.Checkpoint` refuses Keras 3 metrics.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.errors import DamagedStore
from histopipe.files import appearing

STATE_FILE = "resume.npz"


@dataclass(slots=True)
class TrainState:
    """Where a training stands, besides its variables.

    Attributes:
        epoch: the next one.
        best_auc, best_loss: of the best epoch on validation.
        best_epoch: the model that `model.keras` holds; -1 for none yet.
        waited: epochs since then.
        skipped: keys of damaged patches.
        history: one row an epoch.
    """

    epoch: int = 0
    best_auc: float = -1.0
    best_loss: float = float("inf")
    best_epoch: int = -1
    waited: int = 0
    skipped: list[int] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


def save_state(folder: Path, state: TrainState, variables: Sequence[Any]) -> None:
    """Write `resume.npz` by one rename."""
    arrays = {f"v{i:05d}": np.asarray(variable.value) for i, variable in enumerate(variables)}
    with appearing(folder / STATE_FILE) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, state=np.array(json.dumps(asdict(state))), **arrays)
        file.flush()
        os.fsync(file.fileno())


def load_state(folder: Path, variables: Sequence[Any]) -> TrainState:
    """Put variables back as they were, and tell where the training stood.

    Raises:
        DamagedStore: the file is damaged, or of another model.
    """
    path = folder / STATE_FILE
    try:
        with np.load(path, allow_pickle=False) as saved:
            state = TrainState(**json.loads(str(saved["state"])))
            arrays = [saved[f"v{i:05d}"] for i in range(len(saved.files) - 1)]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise DamagedStore(
            f"{path} is damaged", found=str(error), todo="begin a new run"
        ) from error
    shapes, wanted = [a.shape for a in arrays], [tuple(v.shape) for v in variables]
    if shapes != wanted:
        raise DamagedStore(
            f"{path} is of another model", found=f"{len(shapes)} variables",
            expected=f"{len(wanted)} of this model's shapes",
        )  # fmt: skip
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)
    return state
