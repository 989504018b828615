"""Labels of patches by people: a folder with what all raters share, and one journal per rater.

`labels.json` has the classes, and which patients are held out: their labels measure the classifier, and never train it.
`subsets.csv` has the same for `histopipe train --split-column subset`.
`RATER.jsonl` has one line per act, which is on the disk before the act counts:

    {"number": 1, "id": "5f0c", "time": "2026-11-29T10:00:00+00:00", "act": "label", "class": "tumour",
     "patches": [["slide-1", 512, 1024]], "offered": [], "crcs": {"slide-1": 123}}
    {"number": 2, "id": "77ab", "time": "2026-11-29T10:00:05+00:00", "act": "undo"}

An act "label" with the class null removes labels; "undo" reverts the last act that is not reverted; "redo" repeats the one
that was reverted last. An act "mark" with a slide and true or false marks the slide or removes its mark; it is no part of
undo and redo. A second act with the `id` of an earlier one changes nothing, so that a request can be repeated.
A last line without its end was never confirmed, and is removed. `offered` are those of the patches that
were drawn at random to measure the classifier. `crcs` identify the patches of slides that the journal
labels for the first time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from histopipe.annotations.rules import AGREED
from histopipe.errors import DamagedStore, HistopipeError, MachineShort, UsageError
from histopipe.system.files import (
    Closing,
    flush_to_disk,
    make_folder,
    read_json_object,
    roomy,
    run_on_error,
    write_json,
)
from histopipe.system.locks import locked, locked_alone
from histopipe.system.table_files import read_dicts, write_table

STUDY, SUBSETS = "labels.json", "subsets.csv"
UNSURE = "unsure"
MOST_CLASSES = 9
MOST_PATCHES = 100_000
"""Most patches of one act."""
_HELD_OUT = 0.3
"""Share of the patients, or of the regions of the only patient, that are held out."""
_REGION_UM = 250.0
"""Side of regions, in µm."""
_MOST_TEXT = 100
_MOST_PIXELS = 1 << 31
_RATER = re.compile(r"\w[\w.-]{0,39}")
_SUFFIX = ".jsonl"

PatchPlace = tuple[str, int, int]
"""Id of the slide, and top left corner, level-0 pixels."""


def _share(seed: int, *key: str | int) -> float:
    """Return a number from 0 to 1 that a seed and a key determine."""
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True, slots=True)
class LabelStudy:
    """What the raters of a folder share.

    Attributes:
        classes: names of the classes, by number.
        seed: seed of the assignment of patients.
        held_out, training: patients.
        divided: the only patient at the beginning, of which regions are held out.
    """

    classes: tuple[str, ...]
    seed: int = 1
    held_out: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()

    def is_held_out(self, patient: str, x_um: float, y_um: float) -> bool:
        """Return whether a patch is held out: its patient, or of a divided patient its region. Places are in µm."""
        if patient not in self.divided:
            return patient in self.held_out
        region = [math.floor(at / _REGION_UM) for at in (x_um, y_um)]
        return _share(self.seed, patient, *region) < _HELD_OUT

    def with_patients(self, patients: Iterable[str]) -> LabelStudy:
        """Return the study with new patients, which are assigned. The others stay where they are."""
        before = {*self.held_out, *self.training, *self.divided}
        new = sorted({*patients} - before, key=lambda patient: _share(self.seed, patient))
        if len(new) == 1 and not before:
            return replace(self, divided=(*new,))
        count = math.ceil(_HELD_OUT * len(new))
        if before:
            count = sum(_share(self.seed, patient) < _HELD_OUT for patient in new)
        return replace(
            self,
            held_out=(*self.held_out, *new[:count]),
            training=(*self.training, *new[count:]),
        )


def open_study(
    folder: Path, patients: Iterable[str], *, classes: Sequence[str] = (), seed: int = 1
) -> LabelStudy:
    """Read what the raters of a folder share, and write it if there is none, or if classes or patients are new.

    Raises:
        UsageError: there are no classes, the classes are not those of the folder, or the file cannot be used.
    """
    if not (folder / STUDY).exists():
        _check_classes(classes)  # before a folder is created
    make_folder(folder)
    with locked(folder, wait_seconds=5.0):
        recorded = read_study(folder) if (folder / STUDY).exists() else LabelStudy((), seed)
        names = tuple(classes) or recorded.classes
        if names[: len(recorded.classes)] != recorded.classes:
            raise UsageError(
                "--classes",
                found=",".join(names),
                expected=f"{','.join(recorded.classes)} (those of {folder}), and perhaps more after them",
            )
        _check_classes(names)
        study = replace(recorded, classes=names).with_patients(patients)
        if study != recorded:
            write_json(folder / STUDY, asdict(study))
    return study


def write_subsets(folder: Path, study: LabelStudy, patients: Mapping[str, str]) -> None:
    """Write `subsets.csv`, for trainings with the same held-out patients. `patients` are by slide id.

    Of a divided patient, who is in both parts, there is no row.
    """
    rows = [
        (slide, patient, "test" if patient in study.held_out else "train")
        for slide, patient in sorted(patients.items())
        if patient not in study.divided
    ]
    if rows:
        write_table(folder / SUBSETS, ("slide", "patient", "subset"), rows)


def test_slides(folder: Path) -> set[str]:
    """Return the slides of held-out patients, by `subsets.csv`; none without the file."""
    path = folder / SUBSETS
    rows = read_dicts(path) if path.exists() else ()
    return {row["slide"] for row in rows if row["subset"] == "test"}


def _check_classes(names: Sequence[str]) -> None:
    wrong = [
        name
        for name in names
        if not 0 < len(name) <= _MOST_TEXT or not name.isprintable() or name == UNSURE
    ]
    if not 2 <= len(names) <= MOST_CLASSES or len({*names}) < len(names) or wrong:
        raise UsageError(
            "--classes",
            found=",".join(names) or "none",
            expected=f"2 to {MOST_CLASSES} different names, such as tumour,stroma; {UNSURE} has a key without it",
        )


def is_study(folder: Path) -> bool:
    """Return whether a folder has labels of raters: other tools may have files of the same name."""
    try:
        return "held_out" in read_json_object(folder / STUDY)
    except (OSError, ValueError):
        return False


def read_study(folder: Path) -> LabelStudy:
    """Read what the raters of a folder share.

    Raises:
        UsageError: there is none, or it cannot be used.
    """
    try:
        value = read_json_object(folder / STUDY)
        names = ("classes", "held_out", "training", "divided")
        lists = {name: tuple(map(str, value[name])) for name in names}
        study = LabelStudy(seed=int(value["seed"]), **lists)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UsageError(f"{folder / STUDY} cannot be used", found=repr(error)[:200]) from error
    _check_classes(study.classes)
    return study


class Labels:
    """The labels of one rater, as the acts of a journal leave them.

    Attributes:
        labels: the class, or `UNSURE`, by patch.
        offered: patches with a label, now or before, that were drawn at random for the held-out part.
        crcs: CRC of the patches of each slide with labels.
        marks: ids of the slides that the rater has marked.
        by_slide: number of labels by slide.
        count: number of acts.
        earlier: labels before each act that is not reverted, by each patch that was ever labelled.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.labels: dict[PatchPlace, str] = {}
        self.offered: set[PatchPlace] = set()
        self.crcs: dict[str, int] = {}
        self.marks: set[str] = set()
        self.by_slide = Counter[str]()
        self.count = 0
        self._names = (*classes, UNSURE, None)  # not a set: others may have no hash
        self._ids: set[str] = set()
        self._done: list[tuple[str | None, list[PatchPlace]]] = []
        self._undone: list[tuple[str | None, list[PatchPlace]]] = []
        self.earlier: dict[PatchPlace, list[str | None]] = {}

    def has(self, act: str) -> bool:
        """Return whether there is an act with this id."""
        return act in self._ids

    @property
    def can_undo(self) -> bool:
        """Whether there is an act to undo."""
        return bool(self._done)

    @property
    def can_redo(self) -> bool:
        """Whether there is an act to redo."""
        return bool(self._undone)

    def check(self, act: Mapping[str, Any]) -> None:
        """Check the form of an act, and that it is possible.

        Raises:
            UsageError: it is not.
        """
        kind, ident = act.get("act"), act.get("id")
        possible = {"label": True, "mark": True, "undo": self.can_undo, "redo": self.can_redo}
        is_id = isinstance(ident, str) and 0 < len(ident) <= _MOST_TEXT and ident.isprintable()
        if not is_id or kind not in [*possible]:
            raise UsageError(
                "act", found=str(act)[:100], expected="an id, and label, mark, undo or redo"
            )
        if not possible[kind]:
            raise UsageError(f"there is nothing to {kind}")
        if kind == "mark" and [type(act.get(name)) for name in ("slide", "marked")] != [str, bool]:
            raise UsageError("mark", found=str(act)[:100], expected="a slide, and true or false")
        if kind != "label":
            return
        patches = act.get("patches")
        if not isinstance(patches, list) or not 0 < len(patches) <= MOST_PATCHES:
            raise UsageError("patches", expected=f"a list of 1 to {MOST_PATCHES:,} patches")
        for patch in (*patches, *act.get("offered", [])):
            is_patch = isinstance(patch, list | tuple) and [*map(type, patch)] == [str, int, int]
            if not is_patch or max(map(abs, patch[1:])) >= _MOST_PIXELS:
                raise UsageError("patches", found=str(patch)[:100], expected="slide, x and y")
        if act.get("class") not in self._names:
            raise UsageError(
                "class", found=str(act.get("class"))[:100], expected="one of the folder"
            )
        crcs = act.get("crcs", {})
        if not isinstance(crcs, dict) or {*map(type, crcs.values())} - {int}:
            raise UsageError("crcs", found=str(crcs)[:100], expected="a number by slide")
        new = {patch[0] for patch in patches} - self.crcs.keys() - crcs.keys()
        if new:
            raise UsageError("crcs", found="none", expected=f"those of {sorted(new)[0][:100]}")

    def apply(self, act: Mapping[str, Any]) -> list[PatchPlace]:
        """Apply an act that was checked, and return the patches that it changes."""
        self.count += 1
        self._ids.add(act["id"])
        if act["act"] == "mark":
            (self.marks.add if act["marked"] else self.marks.discard)(act["slide"])
            return []
        if act["act"] == "undo":
            label, patches = self._done.pop()
            self._undone.append((label, patches))
            for patch in patches:
                self._set(patch, self.earlier[patch].pop())
            return patches
        if act["act"] == "redo":
            label, patches = self._undone.pop()
        else:
            label, patches = act["class"], [*_places(act["patches"])]
            self.offered.update(_places(act.get("offered", [])))
            self._undone.clear()
            self.crcs.update(act.get("crcs", {}))
        self._done.append((label, patches))
        for patch in patches:
            self.earlier.setdefault(patch, []).append(self.labels.get(patch))
            self._set(patch, label)
        return patches

    def _set(self, patch: PatchPlace, label: str | None) -> None:
        self.by_slide[patch[0]] += (label is not None) - (patch in self.labels)
        if label is None:
            self.labels.pop(patch, None)
        else:
            self.labels[patch] = label


def check_rater(rater: str) -> None:
    """Raise a UsageError if a name of a rater is not allowed."""
    if not _RATER.fullmatch(rater) or rater == AGREED:
        raise UsageError(
            "--rater",
            found=repr(rater)[:_MOST_TEXT],
            expected=f"a name of letters, digits, - _ . (at most 40), not {AGREED}",
        )


def _places(patches: Iterable[Sequence[Any]]) -> dict[PatchPlace, None]:
    """Return the patches of an act, each once."""
    return dict.fromkeys((slide, x, y) for slide, x, y in patches)


class Journal(Labels, Closing):
    """The journal of a rater, to which acts can be added. One process at a time can open it.

    Raises:
        UsageError: the name is not allowed, or another process has the journal open.
        DamagedStore: a line cannot be read.
    """

    def __init__(self, folder: Path, rater: str, classes: Sequence[str]) -> None:
        super().__init__(classes)
        check_rater(rater)
        self.rater, self.path = rater, folder / f"{rater}{_SUFFIX}"
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise UsageError(f"{self.path} is no journal", expected="a file, or none")
        self._stack = ExitStack()
        with run_on_error(self._stack.close):
            in_use = f"the journal of {rater} is open in another viewer"
            todo = "close that viewer, or choose another --rater"
            self._stack.enter_context(locked_alone(self.path, in_use, todo))
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._stack.callback(os.close, self._fd)
            self._size = _replay(self.path, self)
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
            flush_to_disk(folder)

    def close(self) -> None:
        """Close the file."""
        self._stack.close()

    def add(self, act: Mapping[str, Any]) -> list[PatchPlace]:
        """Write an act, and return the patches that it changes once it is on the disk; none if it was written before.

        Raises:
            UsageError: the act is not valid.
            MachineShort, OSError: it cannot be written. Then nothing has changed.
        """
        if self.has(str(act.get("id"))):
            return []
        self.check(act)
        opened = os.fstat(self._fd)
        is_same = opened.st_size == self._size and opened.st_nlink > 0
        if not is_same or not os.path.samestat(opened, self.path.lstat()):
            raise MachineShort(
                f"{self.path} was removed or changed by another program",
                todo="bring it back, and start the viewer again",
            )
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = {**act, "number": self.count + 1, "time": time}
        line = json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            with roomy(self.path.parent, then="label the patches again"):
                written = os.write(self._fd, line)
                os.fsync(self._fd)
        except (OSError, HistopipeError):
            os.ftruncate(self._fd, self._size)
            raise
        if written < len(line):
            os.ftruncate(self._fd, self._size)
            raise MachineShort(f"{self.path} cannot be written", found="no space on the disk")
        self._size += len(line)
        return self.apply(act)


def read_labels(folder: Path, rater: str, classes: Sequence[str]) -> Labels:
    """Read the labels of a rater, also while they are written.

    Raises:
        UsageError: there is no such rater.
        DamagedStore: a line cannot be read.
    """
    if rater not in raters_of(folder):
        raise UsageError(
            f"{folder} has no rater {rater!r}"[:200], found=", ".join(raters_of(folder)) or "none"
        )
    labels = Labels(classes)
    _replay(folder / f"{rater}{_SUFFIX}", labels)
    return labels


def raters_of(folder: Path) -> list[str]:
    """Return the names of the raters with a journal, sorted."""
    files = folder.glob(f"*{_SUFFIX}")
    return sorted(
        path.stem
        for path in files
        if _RATER.fullmatch(path.stem) and path.is_file() and not path.is_symlink()
    )


def _replay(path: Path, labels: Labels) -> int:
    """Apply the acts of a journal, and return the length of its complete lines in bytes."""
    content = path.read_bytes()
    *lines, torn = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            act = json.loads(line)
            labels.check(act)
            is_next = act["number"] == number and not labels.has(act["id"])
            fault = "" if is_next else f"number {act['number']}, or a repeated id"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            fault = str(error)[:200]
        if fault:
            raise DamagedStore(
                f"{path}, line {number}, cannot be read",
                found=fault,
                todo="restore it from a backup, or remove this line and those after it",
            )
        labels.apply(act)
    return len(content) - len(torn)
