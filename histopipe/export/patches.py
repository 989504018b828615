"""A store's patches for other tools, as the files they are: nothing is decoded, nothing encoded anew."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from histopipe.dataset.arguments import check_whole
from histopipe.dataset.splits import patches_crc
from histopipe.errors import DamagedStore, Interrupted, MachineShort, NothingToDo, UsageError
from histopipe.export.formats import WRITERS, Patch
from histopipe.runs import folder as run_folder
from histopipe.store.format import patch_key, value_crc
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.files import appearing, path_within, read_json
from histopipe.system.filesystems import is_full_disk
from histopipe.system.progress import default_progress, message

PatchFormat = Literal["tfrecord", "webdataset", "folder"]
_PIN = "export.json"


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What an export came to.

    Attributes:
        folder: where the files are.
        files: written in this run.
        kept: that were there already.
        patches: written in this run.
        damaged: what was left out, and why, in words.
    """

    folder: Path
    files: int
    kept: int
    patches: int
    damaged: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        names = ("files", "kept", "patches", "damaged")
        return {"folder": str(self.folder), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is written at once: whole, or not there."""

    path: Path
    rows: Sequence[tuple[int, range]]
    """Slide numbers, and the rows of each."""


def export_patches(
    store: str | Path, *, out: str | Path, to: PatchFormat, shard_patches: int = 10_000
) -> ExportResult:
    """Write every patch of a store's complete slides; what is there already is kept.

    Args:
        store: the store.
        out: the folder.
        to: "tfrecord": a file a slide, with slideflow's feature names. "webdataset": tar files of `shard_patches` patches, each a
            JPEG or PNG and a JSON file. "folder": the patches as files, by label and slide.
        shard_patches: of a tar file.

    Raises:
        UsageError: the folder holds another export, or the store is another one by now.
        NothingToDo: no store, or no patch.
        MachineShort: the disk is full, or something is not installed.
        Interrupted: told to stop; what was complete stays.
    """
    if to not in get_args(PatchFormat):
        raise UsageError("--to", found=repr(to), expected=" or ".join(get_args(PatchFormat)))
    check_whole(1, shard_patches=shard_patches)
    folder = Path(out)
    with Store(Path(store)) as opened, run_folder.held(folder):
        slides = {n: r for n, r in opened.complete.items() if r.stored}
        if not slides:
            raise NothingToDo("no patch to export", todo="see `histopipe info`")
        units = list(_units(folder, slides, to, shard_patches))
        if len({unit.path for unit in units}) < len(units):
            raise UsageError(
                "two slides would share a file", todo="take --to webdataset, or rename one"
            )
        _pin(folder, opened, slides, to, shard_patches)
        return _Export(opened, folder, WRITERS[to]).run(units)


class _Export:
    def __init__(self, store: Store, folder: Path, write: Callable[..., None]) -> None:
        self._store, self._folder, self._write = store, folder, write
        self._damaged: list[str] = []
        self._patches = 0

    def run(self, units: Sequence[_Unit]) -> ExportResult:
        missing = [unit for unit in units if not unit.path.exists()]
        progress = default_progress().bar(
            "exporting", unit="files", total=len(units), done=len(units) - len(missing), detail=True
        )
        try:
            for unit in missing:
                unit.path.parent.mkdir(parents=True, exist_ok=True)
                with appearing(unit.path, hidden=True) as part:
                    self._write(part, self._patches_of(unit))
                progress.advance()
        except KeyboardInterrupt:
            done = sum(unit.path.exists() for unit in units)
            raise Interrupted(
                "interrupted", found=f"{done} of {len(units)} files complete",
                todo="the same command goes on with the others",
            ) from None  # fmt: skip
        except Exception as error:
            if not is_full_disk(error):
                raise
            raise MachineShort(
                f"the disk that holds {self._folder} is full",
                todo="make room; the same command goes on with the files that are missing",
            ) from error
        finally:
            progress.close()
        kept = len(units) - len(missing)
        return ExportResult(self._folder, len(missing), kept, self._patches, tuple(self._damaged))

    def _patches_of(self, unit: _Unit) -> Iterator[Patch]:
        """Patches of a unit that are what was written; others are told and left out."""
        for number, rows in unit.rows:
            record, index = self._store.records[number], self._store.index(number)
            lengths, crcs = index["length"], index["crc"]
            for row in rows:
                if not lengths[row]:
                    continue
                problem = None
                try:
                    value = self._store.value(number, row)
                    if value_crc(patch_key(number, row), value) != crcs[row]:
                        problem = "it is not what was written"
                except DamagedStore as error:
                    problem = str(error)
                if problem is not None:
                    self._damaged.append(f"{record.id}: patch {row}: {problem}")
                    message(f"left out: {self._damaged[-1]}")
                    continue
                self._patches += 1
                yield Patch(record, row, value, {name: index[name][row] for name in Patch.COLUMNS})


def _units(
    folder: Path, slides: dict[int, SlideRecord], to: PatchFormat, shard_patches: int
) -> Iterator[_Unit]:
    if to == "tfrecord":
        for number, record in slides.items():
            path = path_within(folder, f"{record.id}.tfrecords")
            yield _Unit(path, [(number, range(record.planned))])
        return
    if to == "folder":
        for number, record in slides.items():
            path = path_within(folder, f"{_flat(record.label or 'unlabelled')}/{_flat(record.id)}")
            yield _Unit(path, [(number, range(record.planned))])
        return
    for record in slides.values():
        path_within(folder, record.id)  # as a name in the tar file
    total = sum(record.planned for record in slides.values())
    for shard in range(-(-total // shard_patches)):
        first, last = shard * shard_patches, min(total, (shard + 1) * shard_patches)
        path = folder / f"patches-{shard:06d}.tar"
        yield _Unit(path, list(_rows_between(slides, first, last)))


def _rows_between(
    slides: dict[int, SlideRecord], first: int, last: int
) -> Iterator[tuple[int, range]]:
    """The rows of slides that patches `first` to `last` - 1 of all of them end to end are."""
    begin = 0
    for number, record in slides.items():
        rows = range(max(first - begin, 0), min(last - begin, record.planned))
        if rows:
            yield number, rows
        begin += record.planned


def _flat(name: str) -> str:
    """A slide's id or a label as the name of one folder: those who read such trees take the first one for the class."""
    return name.replace("/", "__")


def _pin(
    folder: Path, store: Store, slides: dict[int, SlideRecord], to: str, shard_patches: int
) -> None:
    """Write down what is exported, or hold it against what was begun there.

    Raises:
        UsageError: something else was.
    """
    path = folder / _PIN
    crcs = {
        record.id: zlib.crc32(str(record.label).encode(), patches_crc(store, number))
        for number, record in slides.items()
    }
    now: dict[str, Any] = {"to": to, "store": store.uuid, "slides": crcs}
    if to == "webdataset":
        now["shard_patches"] = shard_patches
    if path.exists():
        try:
            there = read_json(path)
            differing = [name for name in now if name != "slides" and there.get(name) != now[name]]
            before: dict[str, int] = there["slides"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedStore(f"{path} is damaged", found=str(error)) from error
        # Where slides share files, one more moves all that follow.
        same = before == crcs if to == "webdataset" else before.items() <= crcs.items()
        if differing or not same:
            what = ", ".join(differing) or "slides of it were ingested, labelled or removed since"
            raise UsageError(
                f"{folder} holds an export of something else", found=f"another {what}" if differing else what,
                todo="choose another --out",
            )  # fmt: skip
    elif any(folder.iterdir()):
        raise UsageError(f"{folder} exists and is not empty", todo="choose another --out")
    with appearing(path) as part:
        part.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
