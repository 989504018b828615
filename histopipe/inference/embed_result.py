"""What an embedding comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """What an embedding came to.

    Attributes:
        folder: where the feature files are.
        dimension: features of a patch.
        done: ids of the slides embedded in this run.
        kept: ids of those that were there already.
        failed: why, by id, for those that could not be embedded.
        patches: embedded in this run.
        skipped: damaged ones left out.
        seconds: that took, from the first batch on.
        input_wait: of these, waiting for patches.
    """

    folder: Path
    dimension: int
    done: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str]
    patches: int
    skipped: int
    seconds: float
    input_wait: float

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        names = (
            "dimension",
            "done",
            "kept",
            "failed",
            "patches",
            "skipped",
            "seconds",
            "input_wait",
        )
        return {"folder": str(self.folder), **{name: getattr(self, name) for name in names}}
