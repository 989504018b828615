"""A folder of results that several processes fill, on one machine or many.

Each process does one part of the slides. It writes the files of these slides, and what all parts must agree on, and
which slides failed, into `parts/I-of-N/`. It never writes a file of all slides: the command with `join`, or without a
part, writes the tables of the folder when the parts have ended. Since complete slides are kept, a part that died is done
by running it again.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from histopipe.errors import UsageError
from histopipe.system.files import make_folder, read_record, record_or_check, write_atomically
from histopipe.system.locks import UNLOCK_SECONDS, held, locked_alone
from histopipe.system.output import Result, aligned, counted
from histopipe.system.worker_pool import count_usable_cores

PARTS = "parts"
_LOCK, _JOURNAL = "lock", "journal"
"""Record of a part that has ended: failed slides, with their reasons, and rows of tables."""
_SAMPLED = 6
"""Slides of a sample."""
_JOIN_SECONDS = 60.0
"""Time for which a process with `join` waits for the last part, or for another process with `join`."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one process in the work of a folder: part `number` of `count`, or all of it if both are 0.

    With `join`, all of it, but nothing is computed.
    """

    number: int = 0
    count: int = 0
    join: bool = False
    batches: int = 0
    """Most batches of a slide; 0 for all."""

    @property
    def is_part(self) -> bool:
        """Whether other processes do the rest, and the tables."""
        return self.count > 0

    def folder(self, out: Path) -> Path:
        """Return the folder of what only this process writes."""
        return out / PARTS / f"{self.number}-of-{self.count}" if self.is_part else out

    @contextmanager
    def held(self, out: Path) -> Iterator[None]:
        """Create a folder if it is missing. Lock it: for this process, or for this and other parts.

        Raises:
            UsageError: it cannot be created, or another process has locked it.
        """
        folder, part, todo = self.folder(out), self.is_part, "wait until it ends"
        wait_seconds = _JOIN_SECONDS if self.join else UNLOCK_SECONDS
        make_folder(folder, of=out)
        alone = partial(locked_alone, todo=todo, wait_seconds=0.0 if part else wait_seconds)
        in_use = f"{out} is in use by {'a process without --part' if part else 'parts'}"
        with ExitStack() as stack:
            # Files, because a network filesystem does not lock folders for other machines.
            if (out / PARTS).is_dir():
                stack.enter_context(alone(out / PARTS / _LOCK, in_use, shared=part))
            if part:  # a process without --part may have begun before there was a folder of parts
                stack.enter_context(alone(out, in_use, shared=True))
                stack.enter_context(alone(folder / _LOCK, f"{folder} is in use by another process"))
            stack.enter_context(held(folder, wait_seconds=wait_seconds))
            for journal in out.rglob(f"{PARTS}/{folder.name}/{_JOURNAL}") if part else ():
                journal.unlink()  # also of features in the folder, which have parts, too
            yield

    def record(self, path: Path, settings: Mapping[str, Any], **how: Any) -> None:
        """Record settings as `record_or_check`, a part in its folder; and compare them with those of all parts."""
        self.joined(path.parent)  # raises before anything is recorded
        mine = self.folder(path.parent) / path.name
        mine.parent.mkdir(parents=True, exist_ok=True)
        first = not mine.exists()
        record_or_check(mine, settings, **how)
        try:
            for record in [*([path] if path.exists() else []), *recorded_by_parts(path)]:
                record_or_check(record, settings, **how)
        except UsageError:
            if first:  # it must not stop parts that are right
                mine.unlink()
            raise

    def chosen(self, work: Mapping[str, float]) -> Collection[str]:
        """Return the names of the items that this process does."""
        return divide(work, self.count)[self.number - 1] if self.is_part else work.keys()

    def end(self, out: Path, failed: Mapping[str, str], **values: Any) -> None:
        """Record that this part has ended, with the reason of each failed slide, and values for the tables."""
        if self.is_part:
            content = {"failed": dict(failed), **values}
            write_atomically(self.folder(out) / _JOURNAL, json.dumps(content, ensure_ascii=False))

    def joined(self, out: Path, name: str = "failed") -> dict[str, Any]:
        """Return the values of a name, by slide, that the parts have recorded; none if this process computes slides."""
        if not self.join:
            return {}
        if not (out / PARTS).is_dir():
            raise UsageError(f"{out} has no parts to join", todo="run the parts first: --part 1/4")
        values: dict[str, Any] = {}
        for folder in _folders(out):
            values |= (read_record(folder / _JOURNAL) or {}).get(name, {})
        return values

    def missing(self, out: Path, slide: str) -> UsageError:
        """Return the error that a slide is not done when parts are joined."""
        names = [folder.name for folder in _folders(out) if not (folder / _JOURNAL).exists()]
        return UsageError(
            f"{slide} is not done",
            found=f"parts that have not ended: {', '.join(names)}" if names else "no part did it",
            expected="with --join: all parts have ended",
            todo="run these parts again, or the command without --join",
        )


def _sampled_batches() -> int:
    # As many batches are loading before the first result as there are cores, and two: a forecast needs several times that.
    return max(5, 4 * (count_usable_cores() + 2) // _SAMPLED)


@dataclass(frozen=True, slots=True)
class Sample(Share):
    """Some slides of all sizes, whose first batches show how long all take. `work` is that of all slides."""

    slides: int = _SAMPLED
    batches: int = field(default_factory=_sampled_batches)
    work: dict[str, float] = field(default_factory=dict)

    def chosen(self, work: Mapping[str, float]) -> Collection[str]:  # noqa: D102
        self.work.update(work)
        names = sorted(work, key=lambda name: (-work[name], name))
        step = max(1.0, (len(names) - 1) / (self.slides - 1))
        return [names[round(step * place)] for place in range(min(self.slides, len(names)))]


ALL = Share()
"""The share of a process that does all of the work."""


def _folders(out: Path) -> list[Path]:
    """Return the folders of the parts, those that ended last at the end, and the others first."""

    def ended(folder: Path) -> tuple[int, str]:
        with suppress(FileNotFoundError):
            return (folder / _JOURNAL).stat().st_mtime_ns, folder.name
        return 0, folder.name

    return sorted((out / PARTS).glob("*-of-*"), key=ended)


def recorded_by_parts(path: Path) -> list[Path]:
    """Return the records of the parts of a folder that have the name of `path`, the record of all parts."""
    return [each for folder in _folders(path.parent) if (each := folder / path.name).exists()]


def divide(work: Mapping[str, float], count: int) -> list[list[str]]:
    """Divide items into `count` parts: the largest first, each to the part with the least work, then fewest items.

    The result depends on nothing but the names and the work.
    """
    parts: list[list[str]] = [[] for _ in range(count)]
    sums = [(0.0, 0, number) for number in range(count)]
    for name in sorted(work, key=lambda name: (-work[name], name)):
        total, items, number = sums[0]
        parts[number].append(name)
        heapq.heapreplace(sums, (total + work[name], items + 1, number))
    return parts


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class PartsPlan(Result):
    """Slides and work of each part. `unit` is that of the work, such as patches."""

    parts: tuple[tuple[str, ...], ...]
    work: tuple[float, ...]
    unit: str

    @classmethod
    def of(cls, work: Mapping[str, float], count: int, unit: str, **values: Any) -> Self:
        """Divide slides into parts. `values` are those of more attributes."""
        parts = divide(work, max(1, count))
        sums = tuple(sum(work[name] for name in names) for names in parts)
        return cls(parts=tuple(map(tuple, parts)), work=sums, unit=unit, **values)

    def __str__(self) -> str:
        rows = [
            [
                f"part {number}/{len(self.parts)}",
                counted(len(names), "slide"),
                f"{work:,.0f} {self.unit}",
            ]
            for number, (names, work) in enumerate(zip(self.parts, self.work, strict=True), 1)
        ]
        return "\n".join(aligned(rows))
