"""Check this machine and installation: `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from histopipe.diagnostics import graphics, machine
from histopipe.diagnostics.machine import Check, State
from histopipe.errors import ExitCode
from histopipe.system.progress import Progress, default_progress
from histopipe.system.result import Result

_SIGNS = {State.GOOD: "ok  ", State.WARNING: "note", State.BAD: "BAD "}


@dataclass(frozen=True, slots=True, repr=False)
class DoctorReport(Result):
    """Results of all checks."""

    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> ExitCode:
        """6 if a check is bad, else 0."""
        bad = any(check.state is State.BAD for check in self.checks)
        return ExitCode.SHORT if bad else ExitCode.DONE

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            lines.append(f"{_SIGNS[check.state]}  {check.name:14} {check.found}")
            if check.todo:
                lines.append(f"{'':20} -> {check.todo}")
        return "\n".join(lines)


def doctor(store: str | Path = "patches.lmdb", *, progress: Progress | None = None) -> DoctorReport:
    """Check this machine and installation, and the disk of a store.

    Args:
        store: path of a store, which need not exist.
        progress: shows the progress; `default_progress()` if None.

    Returns:
        The results of all checks.

    Example:
        >>> doctor().exit_code  # doctest: +SKIP
        <ExitCode.DONE: 0>
    """
    progress, checks = progress or default_progress(), []
    with progress.bar("doctor", unit="checks") as bar:
        for check in _checks(Path(store)):
            checks.append(check)
            bar.advance()
    return DoctorReport(tuple(checks))


def _checks(folder: Path) -> Iterator[Check]:
    yield machine.python()
    yield machine.processor()
    yield machine.memory()
    yield machine.address_space()
    yield machine.disk(folder)
    yield machine.filesystem(folder)
    yield machine.libraries()
    yield machine.openslide()
    yield machine.readers()
    yield machine.jpeg()
    check, probe = graphics.tensorflow()
    yield check
    gpus = graphics.gpus(graphics.find_driver(), probe)
    yield from gpus
    yield machine.shared_memory(len(gpus))
