"""The slide record: all that a store knows of a slide, as JSON in its `slides` database."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from histopipe.errors import DamagedStore


class SlideState(StrEnum):
    """Where a slide stands. Readers see complete slides only."""

    PENDING = "pending"
    COMPLETE = "complete"
    FAILED = "failed"


class FailureKind(StrEnum):
    """Whether a failed slide is tried again by itself."""

    OPTION = "option"
    """Its scale does not fit the options: looked at again at each ingest, before any pixel is read."""
    FILE = "file"
    """The file is bad: tried again when its size or time changed, or on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideRecord:
    """One slide of a store. Times are nanoseconds since 1970, sizes bytes, dimensions level-0 pixels.

    Attributes:
        path: as the user gave it; `resolved_path` without links, to know the slide again by another way.
        quickhash: OpenSlide's, or None; `tile_hash` then stands in.
        mpp: at level 0; `patch_mpp` as stored. None where unknown.
        level, downsample, read_size, stride: what was read, in pixels of that level.
        error_option: what a failure for the file is also due to, as `--max-unreadable 0.01`; tried again with another.
        annotations: what the patches' labels come from: the file's name and checksum, and the rules; None for none.
        annotation_notes: what was repaired or left out of that file.
        patch_labels: patches by the class that annotations give them.
        quality: how focus, pen and darkness of the patches were measured; None where they were not.
        planned, stored, unreadable: patches; `planned = stored + unreadable` when complete.
        unknown: fields of a later version, kept as they are.
    """

    id: str
    path: str
    resolved_path: str
    state: SlideState = SlideState.PENDING
    size_bytes: int = 0
    mtime_ns: int = 0
    quickhash: str | None = None
    tile_hash: str | None = None
    vendor: str | None = None
    width: int = 0
    height: int = 0
    bounds: list[int] = field(default_factory=list)
    icc_profile: bool = False
    mpp: float | None = None
    mpp_source: str | None = None
    patch_mpp: float | None = None
    level: int | None = None
    downsample: float | None = None
    read_size: int | None = None
    stride: int | None = None
    resampling: str | None = None
    route: str | None = None
    route_reason: str | None = None
    patient: str | None = None
    label: str | None = None
    site: str | None = None
    annotations: str | None = None
    annotation_notes: list[str] = field(default_factory=list)
    patch_labels: dict[str, int] = field(default_factory=dict)
    quality: str | None = None
    planned: int = 0
    stored: int = 0
    unreadable: int = 0
    stored_bytes: int = 0
    error: str | None = None
    error_kind: FailureKind | None = None
    error_option: str | None = None
    notes: list[str] = field(default_factory=list)
    unknown: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record as it is stored."""
        known = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        unknown = known.pop("unknown")
        return {**unknown, **known}

    @classmethod
    def from_json(cls, value: object, *, where: str) -> SlideRecord:
        """The record that a store holds.

        Raises:
            DamagedStore: a field is missing or of another type.
        """
        if not isinstance(value, dict):
            raise DamagedStore(f"{where} is no slide record", found=type(value).__name__)
        known: dict[str, Any] = {
            name: _checked(where, name, value[name], hint)
            for name, hint in _HINTS.items()
            if name in value
        }
        missing = [name for name in ("id", "path", "resolved_path", "state") if name not in known]
        if missing:
            raise DamagedStore(f"{where}: the slide record lacks {', '.join(missing)}")
        return cls(**known, unknown={k: v for k, v in value.items() if k not in _HINTS})

    @property
    def content(self) -> str | None:
        """What two copies of one scan have in common; None matches nothing."""
        return self.quickhash or self.tile_hash


_HINTS = {k: v for k, v in get_type_hints(SlideRecord).items() if k != "unknown"}


def _checked(where: str, name: str, value: Any, hint: Any) -> Any:
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for kind in options:
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            if value in list(kind):
                return kind(value)
        elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        elif kind is NoneType and value is None:
            return None
        elif getattr(kind, "__origin__", None) is list:
            item = get_args(kind)[0]
            if isinstance(value, list) and all(type(v) is item for v in value):
                return value
        elif getattr(kind, "__origin__", None) is dict:
            item = get_args(kind)[1]  # JSON's keys are texts
            if isinstance(value, dict) and all(type(v) is item for v in value.values()):
                return value
        elif type(value) is kind:
            return value
    raise DamagedStore(f"{where}: field {name!r} of the slide record", found=repr(value)[:80])
