"""How outlines become labels of patches: what a user decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from histopipe.errors import UsageError

Origin = Literal["auto", "bounds", "slide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationRules:
    """How outlines become labels; `annotate` describes the fields. `roi` is the class that is a region of interest.

    Raises:
        UsageError: a value is out of range.
    """

    threshold: float = 0.5
    unclassified: str | None = None
    origin: Origin = "auto"
    roi: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise UsageError(
                "--annotation-threshold", found=self.threshold, expected="above 0, up to 1"
            )
        if self.origin not in get_args(Origin):
            raise UsageError(
                "--annotation-origin", found=repr(self.origin), expected=" or ".join(get_args(Origin))
            )  # fmt: skip
        for flag, name in (("--unclassified", self.unclassified), ("--roi", self.roi)):
            if name is not None and not name.strip():
                raise UsageError(flag, found="an empty name", expected="a class")

    def to_json(self) -> dict[str, Any]:
        """Return what labels depend on besides the file."""
        return {name: getattr(self, name) for name in ("threshold", "unclassified", "origin")}
