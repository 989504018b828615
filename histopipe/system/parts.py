"""Options of commands whose work is divided into parts. `--help` imports this module, so it imports nothing slow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from histopipe.errors import UsageError
from histopipe.system.settings import setting

if TYPE_CHECKING:
    from histopipe.system.shared_folders import Share

MACHINES = "Several machines"
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
            expected="I/N, slurm/N or kubernetes/N, with I from 1 to N",
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


@dataclass(frozen=True, kw_only=True)
class ShareOptions:
    """Options of commands whose work can be divided over processes that share the folder `out`."""

    part: str | None = setting(
        None,
        "Do part I of N only (I/N), for several processes with the same folder; slurm/N and "
        "kubernetes/N: the part of this job's index in its array.",
        group=MACHINES,
        metavar="I/N",
    )
    join: bool = setting(
        False,
        "After all parts: compute nothing, and write what concerns all of them.",
        group=MACHINES,
    )

    @property
    def share(self) -> Share:
        """The share of this process.

        Raises:
            UsageError: the part has another form, or is not in the environment.
        """
        # Imported late: `--help` does not need it.
        from histopipe.system.shared_folders import Share

        # With --join, --part may stay: it is the command of the parts with one more flag.
        return (
            Share(*read_part(self.part)) if self.part and not self.join else Share(join=self.join)
        )


@dataclass(frozen=True, kw_only=True)
class PartOptions(ShareOptions):
    """Options of commands whose slides can be divided, also by a cluster."""

    cluster: str | None = setting(
        None,
        "Do the parts on a Dask cluster: tcp://HOST:PORT, slurm:N or local:N. If workers have the resource GPU, each "
        "part takes one.",
        group=MACHINES,
    )

    def __post_init__(self) -> None:
        if self.cluster and (self.part or self.join):
            raise UsageError("--cluster", found="with --part or --join", expected="one of them")
