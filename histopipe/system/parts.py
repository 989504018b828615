"""Parts of a work: the part of a process, the division of slides into parts, and the plan of all parts."""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from histopipe.errors import UsageError
from histopipe.system.output import Result, aligned, counted

_FORM = "I/N, slurm/N or kubernetes/N"
_NUMBERS = re.compile(r"([1-9]\d*)/([1-9]\d*)")


def read_part(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return number, from 1, and count of a part: I/N, or the index of an array of jobs in the environment.

    Raises:
        UsageError: the text has another form, or the environment has no index.
    """
    kind, _, count = text.partition("/")
    read, todo = text, None
    if kind == "slurm" and count:
        kind = f"{_index(text, 'SLURM_ARRAY_TASK_ID', environment)}"
        read, todo = (
            f"SLURM_ARRAY_TASK_ID={kind}",
            f"submit the job with `sbatch --array=1-{count}`",
        )
    elif kind == "kubernetes" and count:
        kind = f"{_index(text, 'JOB_COMPLETION_INDEX', environment) + 1}"
    numbers = _NUMBERS.fullmatch(f"{kind}/{count}")
    if numbers is None or int(numbers[1]) > int(numbers[2]):
        raise UsageError(
            f"--part{f' {text}' * (read != text)}",
            found=read,
            expected=f"{_FORM}, with I from 1 to N",
            todo=todo,
        )
    return int(numbers[1]), int(numbers[2])


def _index(part: str, name: str, environment: Mapping[str, str]) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise UsageError(
            f"--part {part}",
            found=f"{name}={value}" if value else f"no {name}",
            expected="a job of an array",
            todo="name the part: --part 1/4",
        )
    return int(value)


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
