"""What is known of a slide whose patches were predicted: written beside its predictions when these are whole."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.errors import DamagedStore
from histopipe.store.record import SlideRecord
from histopipe.system.files import appearing, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideFacts:
    """A slide and where its patches lie, level-0 pixels.

    Attributes:
        slide, patient: its id, and whose it is.
        label: its class, where one is known.
        width, height: of level 0; `bounds` are x, y, width and height of what was scanned of it.
        mpp, mpp_source: at level 0, and where that came from; None where unknown.
        size_l0, stride_l0: side of a patch, and distance of neighbours.
        patches, skipped: predicted, and damaged ones left out.
        source: what the patches were made of, so that it can be seen whether they would be the same.
    """

    slide: str
    patient: str
    label: str | None
    width: int
    height: int
    bounds: list[int]
    mpp: float | None
    mpp_source: str | None
    size_l0: float
    stride_l0: float
    source: str
    patches: int = 0
    skipped: int = 0
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, record: SlideRecord, *, source: str) -> SlideFacts:
        """The facts that a record tells."""
        scale = record.downsample or 0.0
        return cls(
            slide=record.id, patient=record.patient or record.id, label=record.label,
            width=record.width, height=record.height,
            bounds=list(record.bounds) or [0, 0, record.width, record.height], mpp=record.mpp,
            mpp_source=record.mpp_source, size_l0=(record.read_size or 0) * scale, stride_l0=(record.stride or 0) * scale,
            source=source, notes=list(record.notes),
        )  # fmt: skip

    def write(self, path: Path) -> None:
        """As a JSON file, by one rename."""
        with appearing(path, hidden=True) as part:
            part.write_text(
                json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False), encoding="utf-8"
            )

    @classmethod
    def read(cls, path: Path) -> SlideFacts:
        """What `write` wrote.

        Raises:
            DamagedStore: it is something else.
        """
        try:
            value: dict[str, Any] = read_json(path)
            facts = cls(**value)
            numbers = (facts.width, facts.height, *facts.bounds, facts.size_l0, facts.stride_l0)
            if len(facts.bounds) != 4 or not all(isinstance(n, int | float) for n in numbers):
                raise TypeError("numbers expected")  # noqa: TRY301 - told with the others
        except (OSError, ValueError, TypeError) as error:
            raise DamagedStore(
                f"{path} is damaged", found=str(error)[:200], todo="remove it, and predict again"
            ) from error
        return facts
