"""How far a command is, on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

_SECONDS_BETWEEN_LINES = 30.0

Told = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


@contextmanager
def fraction_bar(what: str, unit: str, *, scale: bool = False) -> Iterator[Told]:
    """Shows how much of something is done.

    Args:
        what: is being done.
        unit: of what is counted.
        scale: write large counts as 12.3M.
    """
    # Late: `--help` needs none of it.
    from tqdm import tqdm

    if sys.stderr.isatty():
        with tqdm(desc=what, unit=f" {unit}", unit_scale=scale, leave=False, total=0) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)
                if done >= total:
                    bar.close()  # what comes next may have bars of its own

            yield show
        return
    last = time.monotonic()

    def write(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            click.echo(f"{what}: {done / max(1, total):.0%} of {total:,} {unit}", err=True)

    yield write
