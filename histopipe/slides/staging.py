"""Copy slides to a local disk before they are read: from slow disks, network filesystems and object storage.

Slides are read by many small reads, each of which waits for a network or for a disk head. A copy needs a few large
reads. Copies are in a folder that belongs to one run, whose lock ends with the process: a later run with the same
staging folder removes the copies of a killed run, and nothing else.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from histopipe.errors import (
    MachineShort,
    OptionUnfit,
    RemoteError,
    SlideError,
    SlideUnreadable,
    UsageError,
    reported_as,
    strerror,
)
from histopipe.slides.slide_files import Fingerprint, SlideFile, fingerprint
from histopipe.system.files import free_bytes, is_full_disk, network_filesystem, run_on_error
from histopipe.system.locks import locked
from histopipe.system.object_storage import download

T = TypeVar("T")

_PREFIX = "histopipe-stage-"
_BLOCK = 16 << 20
"""Bytes per read: at 5 ms per read and 50 MB/s, waiting takes 2 % of the time."""
_SPARE_BYTES = 64 << 20
"""Free space that is left on the staging disk."""
_LOCK_SECONDS = 10.0
"""Time to wait for other runs, which lock the parent folder only while they remove leftovers and create a folder."""
_POLL_SECONDS = 0.2
"""Time after which the copier looks for free space again, and a caller notices that it waits for a release."""


class StagingArea(ExitStack):
    """Copies slides into a local folder, one after the other, at most `limit_bytes` at once.

    A copy is a `SlideFile` with the fingerprint of the original. The folder of its path has no other slide. `close` stops
    copying and removes all copies. `advance` is called with the number of bytes that were copied. `starved` is whether
    copying waits until a slide is released.

    Raises:
        UsageError: the folder cannot be created, or is on a network filesystem.
    """

    def __init__(
        self, parent: Path, limit_bytes: int, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        kind = network_filesystem(parent)
        if kind is not None:
            raise UsageError(
                f"--stage {parent} is on a network filesystem",
                found=kind,
                expected="a folder on a local disk",
            )
        super().__init__()
        self._limit, self._advance = limit_bytes, advance
        # Sizes of the copies by their folders. They are made in this order: all before one that is made are complete.
        self._held: dict[Path, int] = {}
        # Copies by their originals, and the number of slides that use a folder: more than one for cores.
        self._copies: dict[Path, tuple[Future[SlideFile], Path]] = {}
        self._users = Counter[Path]()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._numbers, self.starved = itertools.count(), False
        with reported_as(UsageError, f"--stage {parent} cannot be used", OSError, reason=strerror):
            parent.mkdir(parents=True, exist_ok=True)
            # While another run creates its folder, that folder is not locked yet.
            with locked(parent, wait_seconds=_LOCK_SECONDS):
                _remove_leftovers(parent)
                self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).absolute()
                self.enter_context(locked(self.folder))
        self._copier = ThreadPoolExecutor(1, "histopipe-stage")
        # `close` calls these from the last to the first: no copy may begin after the folder is removed.
        self.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.callback(self._copier.shutdown, cancel_futures=True)
        self.callback(self._stop.set)

    def start(self, slide: SlideFile) -> Future[SlideFile] | None:
        """Start to copy a slide. Return None if other slides must be released first.

        The future raises SlideError if the slide cannot be copied, and MachineShort if the disk is full.
        """
        try:
            before = fingerprint(slide)
            if before.size_bytes > self._limit:
                raise OptionUnfit(
                    f"{slide.location} is too large to be staged",
                    found=f"{before.size_bytes / 1e9:.3f} GB",
                    expected=f"at most --stage-gb {self._limit / 1e9:g}",
                    todo="increase --stage-gb",
                )
        except SlideError as error:
            failed = Future[SlideFile]()
            failed.set_exception(error)
            return failed
        with self._lock:
            shared = self._copies.get(slide.path)
            if slide.core is not None and shared is not None and self._users[shared[1]]:
                first, folder = shared
                self._users[folder] += 1
                # The copier is one thread, so that the copy for the first core has ended then.
                core = partial(replace, id=slide.id, core=slide.core)
                return self._copier.submit(lambda: core(first.result()))
            if self._held and sum(self._held.values()) + before.size_bytes > self._limit:
                return None
            folder = self.folder / f"{next(self._numbers):06}"
            self._held[folder], self._users[folder] = before.size_bytes, 1
            copy = self._copier.submit(self._copy, slide, before, folder)
            self._copies[slide.path] = copy, folder
            return copy

    def release(self, folder: Path) -> None:
        """Remove the copy of a slide, its folder in this area, unless other cores of it are read."""
        with self._lock:
            self._users[folder] -= 1
            if self._users[folder] > 0:
                return
        self._remove(folder)

    def _remove(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            # Workers may still have the files open, which would keep their space.
            with suppress(OSError):
                os.truncate(path, 0)
        shutil.rmtree(folder, ignore_errors=True)
        with self._lock:
            self._held.pop(folder, None)
            self._users[folder] = 0

    def _copy(self, slide: SlideFile, before: Fingerprint, folder: Path) -> SlideFile:
        try:
            with run_on_error(partial(self._remove, folder)):
                return self._copy_when_free(slide, before, folder)
        except (MachineShort, SlideError):
            raise
        except RemoteError as error:
            raise SlideUnreadable(str(error)) from None
        except OSError as error:
            raise SlideUnreadable(
                f"{slide.location} cannot be copied to {self.folder.parent}", found=str(error)
            ) from error

    def _copy_when_free(self, slide: SlideFile, before: Fingerprint, folder: Path) -> SlideFile:
        """Copy a slide, as soon as other slides are released if the disk is full.

        Raises:
            MachineShort: the disk is full, and there is no other slide.
        """
        needed = before.size_bytes + _SPARE_BYTES
        while True:
            self.starved = False
            with self._lock:
                # Before the free space: a release between both must not look like a full disk without other slides.
                complete = list(itertools.takewhile(lambda held: held != folder, self._held))
            if free_bytes(self.folder) >= needed:
                try:
                    return self._copied(slide, before, folder)
                except OSError as error:
                    if not is_full_disk(error):
                        raise
                shutil.rmtree(folder, ignore_errors=True)  # another process has filled the disk
            if not complete or self._stop.is_set():
                raise MachineShort(
                    f"the staging disk is too full for {slide.location}",
                    found=f"{free_bytes(self.folder) / 1e6:,.0f} MB free in {self.folder.parent}",
                    expected=f"{needed / 1e6:,.0f} MB",
                    todo="free disk space, or pass another --stage, and run the same command again",
                )
            self.starved = True
            self._stop.wait(_POLL_SECONDS)

    def _copied(self, slide: SlideFile, before: Fingerprint, folder: Path) -> SlideFile:
        """Copy all files of a slide, and check that the original did not change."""
        base = slide.path.parent
        files = tuple(folder / path.relative_to(base) for path in slide.files)
        for number, target in enumerate(files):
            target.parent.mkdir(parents=True, exist_ok=True)
            if slide.remote:
                download(slide.remote[number], target, stop=self._stop, advance=self._advance)
            else:
                self._copy_file(slide.files[number], target)
        if fingerprint(slide) != before:
            raise SlideUnreadable(
                f"{slide.location} changed while it was being copied",
                todo="ingest it again when nothing writes to it",
            )
        return replace(
            slide,
            path=folder / slide.path.relative_to(base),
            files=files,
            remote=(),
            original=before,
        )

    def _copy_file(self, source: Path, target: Path) -> None:
        """Copy a file by large sequential reads."""
        with source.open("rb", buffering=0) as read, target.open("xb") as write:
            size = os.fstat(read.fileno()).st_size
            os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            if size:
                os.posix_fallocate(write.fileno(), 0, size)  # a full disk shows before the copy
            buffer, copied = memoryview(bytearray(min(_BLOCK, size) or 1)), 0
            while copied < size and (count := read.readinto(buffer)):
                if self._stop.is_set():
                    raise SlideUnreadable(f"{source}: the copy was stopped")
                write.write(buffer[:count])
                copied += count
                self._advance(count)
        if copied != size:
            raise SlideUnreadable(
                f"{source} cannot be copied completely",
                found=f"{copied:,} bytes",
                expected=f"{size:,} bytes",
            )


def staged(
    stage: StagingArea | None, items: Iterable[T], file_of: Callable[[T], SlideFile]
) -> Iterator[tuple[T, SlideFile | SlideError | None] | None]:
    """Yield items in order with the copies of their slides, while the next slides are being copied.

    Without a stage, the copy is None. Yield None in place of an item if the caller must first release the slides that
    it has received.

    Raises:
        MachineShort: the staging disk is full.
    """
    waiting, copying = deque(items), deque[tuple[T, Future[SlideFile]]]()
    if stage is None:
        yield from ((item, None) for item in waiting)
        return
    while waiting or copying:
        while waiting and (future := stage.start(file_of(waiting[0]))) is not None:
            copying.append((waiting.popleft(), future))
        if copying and wait([copying[0][1]], _POLL_SECONDS).done:
            item, future = copying.popleft()
            error = future.exception()
            yield item, error if isinstance(error, SlideError) else future.result()
        elif not copying or stage.starved:
            yield None


def stage_folder(folder: str | Path | None, slides: Iterable[SlideFile]) -> Path | None:
    """Return the folder to which slides are copied before they are read; None to read them in place.

    Slides at a URL are always copied: into the temporary folder if no folder is given.
    """
    if folder is None and not any(slide.remote for slide in slides):
        return None
    return Path(tempfile.gettempdir() if folder is None else folder).absolute()


def _remove_leftovers(parent: Path) -> None:
    """Remove the staging folders of runs that were killed. Those of running processes and other users are kept."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), ExitStack() as stack:
            if (
                folder.lstat().st_uid == os.getuid()
                and folder.is_dir()
                and not folder.is_symlink()
                and stack.enter_context(locked(folder))
            ):
                shutil.rmtree(folder)
