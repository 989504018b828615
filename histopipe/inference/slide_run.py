"""Run slides through a network, one after the other, and count what becomes of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from histopipe.errors import DamagedStore, Interrupted, SlideError
from histopipe.inference.patch_stream import Network, PatchStream, Results, SlidePatches
from histopipe.system.progress import Progress


@dataclass(frozen=True, kw_only=True, repr=False)
class SlideRunResult:
    """Result of running slides through a network.

    Attributes:
        folder: folder with the files of each slide.
        done, kept: ids of the slides that were computed in this run, and before.
        failed: reason by id, for slides that failed.
        patches, skipped: number of patches computed in this run, and of damaged ones left out.
        seconds: duration of this run.
        input_wait: seconds of these that were spent waiting for patches.
    """

    folder: Path
    done: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str]
    patches: int
    skipped: int
    seconds: float
    input_wait: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "folder": str(self.folder),
            "done": list(self.done),
            "kept": list(self.kept),
            "failed": dict(self.failed),
            "patches": self.patches,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "input_wait": self.input_wait,
        }

    def summary(self, verb: str, patches: str) -> str:
        """Return what was done, and the reason of each slide that failed, as lines of text."""
        lines = [f"{self.skipped} damaged patches left out"] if self.skipped else []
        waiting = self.input_wait / self.seconds if self.seconds else 0.0
        lines.append(
            f"{len(self.done)} slides {verb}, {len(self.kept)} already done, {len(self.failed)} failed; "
            f"{self.patches:,} {patches} in {self.seconds:.0f} s, {waiting:.0%} waiting for input: {self.folder}"
        )
        lines += [f"failed: {name}: {reason}" for name, reason in sorted(self.failed.items())]
        return "\n".join(lines)


class RunSlide(SlidePatches, Protocol):
    """A slide with its id."""

    @property
    def id(self) -> str:
        """Slide id."""


S = TypeVar("S", bound=RunSlide)


@dataclass(slots=True)
class SlideRun:
    """A run of slides through a network.

    Args:
        network: the network.
        title: what is done, for the progress bar.
        count: number of slides, those already done included.
        progress: shows it.
    """

    network: Network
    title: str
    count: int
    progress: Progress
    done: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    patches: int = 0
    skipped: int = 0
    seconds: float = 0.0
    input_wait: float = 0.0

    def run(
        self,
        slides: Iterable[S],
        write: Callable[[S, Iterator[Results]], tuple[int, int]],
        *,
        steps: int | None = None,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Compute slides.

        Args:
            slides: the slides.
            write: takes a slide and its results, writes them, and returns the number of patches and of skipped ones.
            steps: batches of all slides, if known.
            stop: called first after Ctrl-C.

        Raises:
            Interrupted: by Ctrl-C or SIGTERM; slides that are done stay.
        """
        if self.kept:
            self.progress.message(f"{len(self.kept)} slides are already done")
        start = time.monotonic()
        with (
            closing(self.progress.bar(self.title, unit="steps", total=steps, detail=True)) as bar,
            PatchStream(self.network, bar) as stream,
        ):
            try:
                for slide, results in stream.run(slides):
                    try:
                        patches, skipped = write(slide, results)
                    except (SlideError, DamagedStore) as error:
                        self.fail(slide.id, str(error))
                    else:
                        self.done.append(slide.id)
                        self.patches += patches
                        self.skipped += skipped
                        self._report(slide.id, f"{patches:,} patches")
            except KeyboardInterrupt:
                stop()  # before the stream is closed: what it is loading waits for it
                raise Interrupted(
                    "interrupted", found=f"{len(self.done)} slides done",
                    todo="run the same command again to do the others",
                ) from None  # fmt: skip
            finally:
                self.seconds, self.input_wait = time.monotonic() - start, stream.input_wait

    def fail(self, slide: str, reason: str) -> None:
        """Record that a slide failed."""
        self.failed[slide] = reason
        self._report(slide, f"failed: {reason}")

    def result(self, folder: Path) -> dict[str, Any]:
        """Return the fields of a `SlideRunResult`."""
        return {
            "folder": folder, "done": tuple(self.done), "kept": tuple(self.kept),
            "failed": dict(self.failed), "patches": self.patches, "skipped": self.skipped,
            "seconds": self.seconds, "input_wait": self.input_wait,
        }  # fmt: skip

    def _report(self, slide: str, text: str) -> None:
        number = len(self.done) + len(self.failed) + len(self.kept)
        self.progress.message(f"{number}/{self.count} {slide}: {text}")
