"""Whether a store is what was written: its file, its records, its indices, and every value.

data.mdb is read as a file of pages and never given to LMDB, which a damaged tree can bring down. Values are read in the order
that they lie in, by several processes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from histopipe.errors import MachineShort, NothingToDo
from histopipe.maintenance.contents import Contents
from histopipe.maintenance.finding import Finding, Kind, Verified
from histopipe.maintenance.patches import PatchCheck
from histopipe.maintenance.values import Decoder, PatchDecoder, Values, picture_problem, read_values
from histopipe.store.catalog import no_store
from histopipe.store.data_file import DataFile, Meta
from histopipe.store.format import DATABASES, PATCHES, THUMBNAILS
from histopipe.store.handle import pinned
from histopipe.store.second_opinion import lmdb_faults
from histopipe.store.structure import Structure, meta_faults
from histopipe.system.worker_pool import WorkerDied, WorkerPool

T = TypeVar("T")

_AT_ONCE = 4
"""Tasks given out for each worker."""
_PATCHES, _PICTURES = PATCHES.decode(), THUMBNAILS.decode()

_ATTEMPTS = 20
_FEW_PAGES = 8192
"""Pages, 32 MB, that are looked at sooner than processes would have started."""

Told = Callable[[int, int], None]
"""Called with the pages that have been looked at, and with all there are."""


def verify(
    store: str | Path,
    *,
    full: bool = False,
    untrusted: bool = False,
    workers: int | None = None,
    told: Told = lambda *_: None,
) -> Verified:
    """Look at all of a store; nothing is written.

    Args:
        store: the store's folder.
        full: decode every value too.
        untrusted: do not even ask LMDB to keep writers from using pages again, for which it opens the file; ask `lmdb.verify`,
            too, whether the pages are whole; look for links in the folder.
        workers: processes; one a core if not given.
        told: hears how far it is.

    Returns:
        What is wrong, which is nothing for a healthy store. Slides that an ingest has not finished are no fault.

    Raises:
        NothingToDo: there is no store, or nothing in it yet.
        UnknownVersion: it is of a later version, or has a feature that is not known here.

    Example:
        >>> verify("patches.lmdb").findings  # doctest: +SKIP
        []
    """
    with examined(Path(store), full=full, untrusted=untrusted, workers=workers, told=told) as found:
        return found.verified


@dataclass(frozen=True, slots=True)
class Examined:
    """A store that has been looked at, with its file still open.

    Attributes:
        structure: of the file, all of it walked.
        contents: what the store says of itself and its slides.
        verified: what is wrong.
    """

    structure: Structure
    contents: Contents
    verified: Verified


@contextmanager
def examined(
    store: Path,
    *,
    full: bool = False,
    untrusted: bool = False,
    workers: int | None = None,
    told: Told = lambda *_: None,
) -> Iterator[Examined]:
    """As `verify`, for whoever goes on reading the state that was looked at."""
    started = time.monotonic()
    data = store / "data.mdb"
    with _opened(data, pin=not untrusted) as (file, meta):
        structure = Structure(file, meta)
        structure.faults += meta_faults(file)
        structure.read_databases()
        if not structure.faults and not any(tree.entries for tree in structure.trees.values()):
            raise NothingToDo(
                f"{store} is empty: an ingest has only just begun it, or was stopped there"
            )
        contents = Contents(store, structure)
        contents.read()
        check = PatchCheck(contents)
        decoders: dict[str, Decoder | None] = {_PATCHES: None, _PICTURES: None}
        if full and contents.spec:
            decode = PatchDecoder(int(contents.spec["patch_size"]))
            decoders = {_PATCHES: decode, _PICTURES: picture_problem}
        takers = {_PATCHES: check.take, _PICTURES: contents.take_pictures}
        for name, values in _values(data, structure, decoders, workers, told):
            structure.count(name, values.count)
            for key, why in values.lost:
                structure.lost_value(name, key, why)
            takers[name](values)
        check.finish()
        contents.miss_pictures()
        for name, tree in structure.trees.items():
            if name.encode("ascii", "replace") not in DATABASES:
                structure.look_through(name, tree)  # a later version's
        structure.finish()
        findings = [*contents.structural(structure.faults), *contents.findings]
        if untrusted:
            findings += _strange_files(store)
        if untrusted and not any(finding.kind is Kind.STRUCTURE for finding in findings):
            findings += [Finding(Kind.STRUCTURE, f"lmdb.verify: {f}") for f in lmdb_faults(store)]
        seconds = round(time.monotonic() - started, 3)
        slides = len(contents.records)
        verified = Verified(str(store), full, slides, check.patches, file.length, seconds, findings)
        yield Examined(structure, contents, verified)


def _strange_files(store: Path) -> list[Finding]:
    """What in a store's folder would have another file read or written."""
    return [
        Finding(Kind.STRUCTURE, f"{path.name} is no file of its own, but a link or a device")
        for path in sorted(store.iterdir())
        if path.is_symlink() or not (path.is_file() or path.is_dir())
    ]


@contextmanager
def _opened(data: Path, *, pin: bool) -> Iterator[tuple[DataFile, Meta]]:
    """A store's file and the state of it that counts."""
    if not data.is_file() or data.stat().st_size == 0:
        raise no_store(data.parent)
    for attempt in range(_ATTEMPTS):
        with pinned(data.parent) if pin else nullcontext() as transaction, DataFile(data) as file:
            metas = sorted((m for m in file.metas if m is not None), key=lambda m: m.transaction)
            known = [meta for meta in metas if meta.transaction == transaction]
            if transaction is None or known or attempt == _ATTEMPTS - 1:
                yield file, (known or metas)[-1]
                return
        # Two transactions have ended between asking for the newest state and reading which it is.


def _values(
    data: Path,
    structure: Structure,
    decoders: Mapping[str, Decoder | None],
    workers: int | None,
    told: Told,
) -> Iterator[tuple[str, Values]]:
    """The values of some databases, each with its database's name, in the order of their keys."""
    tasks = (
        (name, places)
        for name in decoders
        if name in structure.trees
        for places in structure.leaves(name, structure.trees[name])
    )
    identity = structure.file.identity
    seen, pages = 0, structure.meta.last_page + 1
    count = workers or len(os.sched_getaffinity(0))
    # Decoders are not let into this process: what they are given may be anything.
    here = pages <= _FEW_PAGES and not any(decoders.values())
    pool: Executor = _Here() if here else WorkerPool(count)
    try:
        running: deque[tuple[str, Future[Values]]] = deque()
        for task in chain(tasks, [None]):
            if task is not None:
                name, places = task
                running.append(
                    (name, pool.submit(read_values, data, identity, places, decoders[name]))
                )
            while running and (task is None or len(running) >= _AT_ONCE * count):
                name, future = running.popleft()
                values = future.result()
                seen += values.count.leaf_pages + values.count.overflow_pages
                told(min(seen, pages), pages)
                yield name, values
                if seen > pages:
                    return  # pages that are used again and again, which is told at the end
    except WorkerDied as error:
        raise MachineShort("a process that read the store ended", found=str(error)) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Here(Executor):
    """Calls functions in this process, one after another."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call it at once."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it is raised where the result is wanted
            future.set_exception(error)
        return future
