"""How a training shows what it is doing: a bar an epoch on a terminal, a line an epoch everywhere."""

from __future__ import annotations

import sys
from typing import TextIO

from tqdm import tqdm


class EpochProgress:
    """Counts steps of one pass; silent but for `say` where the stream is no terminal.

    Args:
        title: what the pass is called.
        steps: how many it has; None where that is not known.
        done: how many of them are done.
        stream: standard error if not given.
    """

    def __init__(
        self, title: str, steps: int | None, done: int = 0, stream: TextIO | None = None
    ) -> None:
        stream = stream or sys.stderr
        self._bar = tqdm(
            total=steps, initial=done, desc=title, unit=" steps", file=stream, leave=False,
            disable=not stream.isatty(),
        )  # fmt: skip

    def advance(self) -> None:
        """One more step is done."""
        self._bar.update()

    def close(self) -> None:
        """The pass is over; its bar goes away."""
        self._bar.close()


def say(text: str) -> None:
    """A line on standard error, above any bar."""
    tqdm.write(text, file=sys.stderr)
