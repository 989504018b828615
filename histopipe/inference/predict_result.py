"""What a prediction comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.evaluation.evaluate import Evaluation


@dataclass(slots=True)
class Predicted:
    """What a prediction came to.

    Attributes:
        folder: where it lies.
        done, kept: ids of slides predicted now, and before.
        failed: why, by id.
        patches, skipped: predicted now, and damaged ones left out.
        seconds, input_wait: that it took, and of these waiting for patches.
        metrics: how good it is, where labels of two classes are known.
    """

    folder: Path
    done: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    patches: int = 0
    skipped: int = 0
    seconds: float = 0.0
    input_wait: float = 0.0
    metrics: Evaluation | None = None

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        names = ("done", "kept", "failed", "patches", "skipped", "seconds", "input_wait")
        told = {name: getattr(self, name) for name in names}
        metrics = {} if self.metrics is None else {"metrics": self.metrics.to_json()}
        return {"folder": str(self.folder), **told, **metrics}
