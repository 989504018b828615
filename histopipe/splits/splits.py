"""Splits into training, validation and test patches, and the file `splits.json`.

The file identifies stores by uuid, and each slide by its number of patches and their checksum. So a resumed run reads the
same patches, or fails.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, HistopipeError, UnknownVersion, UsageError
from histopipe.slides.slide_files import SlideHashes
from histopipe.system.files import read_json, reading, write_atomically
from histopipe.system.output import some
from histopipe.system.table_cells import nfc
from histopipe.tasks.choices import CALIBRATION, EVALUATED, SUBSETS, SplitBy, Subset, TaskName
from histopipe.tasks.registry import TASKS, make_task
from histopipe.tasks.task import Target, Task


class SampleGroup(Protocol):
    """Samples that share an id, a label, a patient and a site: a `SlideRecord`, or a `Bag`."""

    @property
    def id(self) -> str:
        """Name, unique in its source."""

    @property
    def label(self) -> str | None:
        """Class of the group; None if it is unlabelled."""

    @property
    def patient(self) -> str | None:
        """Patient; None if unknown, which is replaced by the id."""

    @property
    def site(self) -> str | None:
        """Hospital or scanner; None if unknown."""

    @property
    def scans(self) -> Sequence[SlideHashes]:
        """Hashes of each of its slides."""

    @property
    def planned(self) -> int:
        """Number of samples, including those that could not be read."""

    @property
    def stored(self) -> int:
        """Number of samples that can be read."""

    @property
    def patch_labels(self) -> Mapping[str, int]:
        """Number of samples by class; empty if samples have no separate classes."""


class SampleSource(Protocol):
    """Groups of samples by number: a `Store` of slides, or a `BagSet`."""

    @property
    def path(self) -> Path:
        """File or folder, for messages."""

    @property
    def uuid(self) -> str:
        """Identifier, as recorded in splits."""

    @property
    def records(self) -> Mapping[int, SampleGroup]:
        """All groups by number."""

    @property
    def complete(self) -> Mapping[int, SampleGroup]:
        """All groups that can be read, by number."""

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes that single samples may have, in the order of their numbers."""

    def index(self, slide: int) -> Mapping[str, NDArray[Any]]:
        """Columns of a group, one row per sample; `crc` at least."""


DROPPED = -1
"""Subset of patches that are left out."""
_MAX_PATCHES = 10**8
"""Maximum number of patches of a slide: a damaged file may contain any number."""
_FIELDS: Mapping[str, tuple[type, ...]] = {
    "store": (int,),
    "slide": (int,),
    "id": (str,),
    "label": (str,),
    "patient": (str,),
    "site": (str, type(None)),
    "content": (str, type(None)),
    "count": (int,),
    "crc": (int,),
}
"""Fields of a slide that are plain values in the file, in its order, and their types. A bool is no int."""
SPLITS = "splits.json"
"""Name of the file in a run."""
_NAME = "histopipe-splits"
_PLAIN, _WITH_LABELS, _WITH_TARGETS = 1, 2, 3
"""Format versions. Version 2 has patch classes, which a reader of version 1 would take for slide classes; version 3 has
targets or covariates."""
FIRST_ALGORITHM = "stratified"
"""Algorithm of files that name none: patients by their most frequent class, until version 0.3."""


@dataclass(frozen=True, slots=True)
class SlideSplit:
    """A slide in a split. Copies of one slide, and no other slides, have the same `content`.

    Attributes:
        store, slide: position in the list of stores, slide number.
        count, crc: number of planned patches, and CRC-32 over their CRCs.
        subsets: (count,) int8, 0, 1, 2, 3 for train, validation, test, calibration, -1 for left out.
        labels: (count,) int16 annotated class numbers of the patches, -1 for none; `label` is then the most frequent
            one. None if all patches have the label of the slide.
        target: target of a task other than classification, NaN for missing values; `label` is then its stratum.
        covariates: cells of the covariates, empty for missing ones.
    """

    store: int
    slide: int
    id: str
    label: str
    patient: str
    site: str | None
    content: str | None
    count: int
    crc: int
    subsets: NDArray[np.int8]
    labels: NDArray[np.int16] | None = None
    target: Target | None = None
    covariates: tuple[str, ...] = ()

    def on(self, subset: Subset) -> NDArray[np.int32]:
        """Return the rows in one subset."""
        return np.flatnonzero(self.subsets == SUBSETS.index(subset)).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Splits:
    """Split of the labelled slides of the stores `uuids`. `fractions` are those of train, validation and test.

    Patients who calibrate prediction sets are part of the fraction of train.

    `targets` and `covariates` are the names of their columns. With targets, `classes` are the strata of the split.
    `algorithm` assigned the subsets: "balanced", "random" (by patch), "given" (all by `column`, the split column), or
    "stratified" in earlier versions.
    """

    split_by: SplitBy
    seed: int
    fractions: tuple[float, float, float]
    uuids: tuple[str, ...]
    classes: tuple[str, ...]
    slides: tuple[SlideSplit, ...]
    task_name: TaskName = "classification"
    targets: tuple[str, ...] = ()
    covariates: tuple[str, ...] = ()
    algorithm: str = "balanced"
    column: str | None = None

    @property
    def task(self) -> Task:
        """Task with the columns of its target, or its classes."""
        return make_task(self.task_name, self.targets, self.classes)

    @property
    def by_place(self) -> dict[tuple[int, int], SlideSplit]:
        """Slides by position of the store, and slide number."""
        return {(slide.store, slide.slide): slide for slide in self.slides}

    @property
    def names(self) -> dict[tuple[int, int], str]:
        """Names of the slides in tables, by place: two stores may each have a slide "1"."""
        counts = Counter(slide.id for slide in self.slides)
        return {
            place: slide.id
            if counts[slide.id] == 1
            else f"{slide.id}@{self.uuids[slide.store][:8]}"
            for place, slide in self.by_place.items()
        }

    def slides_on(self, subset: Subset) -> list[SlideSplit]:
        """Return the slides with patches in one subset."""
        return [slide for slide in self.slides if len(slide.on(subset))]

    def target(self, slide: SlideSplit) -> Target:
        """Return the target of a slide; of a classification the number of its class."""
        return slide.target or (float(self.classes.index(slide.label)),)

    def targets_on(self, subset: Subset) -> NDArray[np.float64]:
        """Return the (N, T) targets of the slides in one subset."""
        rows = [self.target(slide) for slide in self.slides_on(subset)]
        return np.array(rows, np.float64).reshape(len(rows), len(self.task.columns))

    def count(self) -> dict[Subset, Counter[str]]:
        """Count the patches by subset and class."""
        counts: dict[Subset, Counter[str]] = {subset: Counter() for subset in SUBSETS}
        for slide in self.slides:
            names = [slide.label] if slide.labels is None else self.classes
            for subset in SUBSETS:
                rows = self.by_class(slide, subset)
                counts[subset].update({name: len(rows.get(name, ())) for name in names})
        return {name: of for name, of in counts.items() if name in EVALUATED or of.total()}

    def by_class(self, slide: SlideSplit, subset: Subset) -> dict[str, NDArray[np.int32]]:
        """Return the rows of a slide in one subset, by class."""
        rows = slide.on(subset)
        if slide.labels is None:
            return {slide.label: rows}
        codes = slide.labels[rows]
        return {self.classes[n]: rows[codes == n] for n in np.unique(codes[codes >= 0]).tolist()}

    def leaks(self) -> list[str]:
        """Return a line for each patient, each set of copies, and by sites each site, that is in several subsets."""
        subsets: dict[tuple[str, str | None], set[int]] = defaultdict(set)
        columns = (("patient", "patient"), ("slide content", "content"), ("site", "site"))
        for what, attribute in columns[: 2 + (self.split_by == "site")]:
            for slide in self.slides:
                value = getattr(slide, attribute)
                # Patients of the training calibrate, who share its sites.
                apart = {DROPPED} | ({CALIBRATION} if what == "site" else set())
                subsets[what, value] |= set(np.unique(slide.subsets).tolist()) - apart
        return [
            f"{what} {value[:40]} on {' and '.join(SUBSETS[i] for i in sorted(numbers))}"
            for (what, value), numbers in subsets.items()
            if value is not None and len(numbers) > 1
        ]

    def shortages(self, unit: str) -> Iterator[str]:
        """Yield a line for each subset with less than half of its share of patients, patches or a class.

        `unit` is the plural noun of what is counted as patches.
        """
        counts = self.count()
        patients = {
            subset: {slide.patient for slide in self.slides_on(subset)} for subset in EVALUATED
        }
        amounts = {
            "patients": {subset: len(names) for subset, names in patients.items()},
            unit: {subset: counts[subset].total() for subset in EVALUATED},
            **{
                f"{unit} of {name}": {subset: counts[subset][name] for subset in EVALUATED}
                for name in (self.classes if self.task.by_class else ())
            },
        }
        if not self.task.by_class:  # such as events, and positive slides of each label
            targets = [(slide.label, slide.target) for slide in self.slides]
            names, needed, _ = self.task.names_to_balance(self.classes, targets)
            pairs = list(zip(names, self.slides, strict=True))
            amounts |= {
                f"slides with {name}": {
                    subset: sum(name in each and len(slide.on(subset)) > 0 for each, slide in pairs)
                    for subset in EVALUATED
                }
                for name in needed
            }
        totals = {what: sum(of_subsets.values()) for what, of_subsets in amounts.items()}
        # With leaks, or a split of slides, a patient may be in several subsets.
        totals["patients"] = len(set().union(*patients.values()))
        for subset, share in zip(EVALUATED, self.fractions, strict=True):
            few = [
                f"{of_subsets[subset]:,} of {totals[what]:,} {what}"
                for what, of_subsets in amounts.items()
                if of_subsets[subset] < share / 2 * totals[what]
            ]
            if few:
                yield f"{subset} has {', '.join(few)}: less than half of its share, {share:.0%}"
        if self.split_by == "site" and joined_sites_note(self.slides):
            yield joined_sites_note(self.slides)


def joined_sites_note(slides: Sequence[SlideSplit]) -> str:
    """Return a note on patients of several sites, which join these sites; empty if there are none."""
    sites = Counter(patient for patient, _ in {(slide.patient, slide.site) for slide in slides})
    names = sorted(patient for patient, count in sites.items() if count > 1)
    return f"sites with a common patient are one: {some(names, 3)}" if names else ""


def write_splits(splits: Splits, path: Path) -> None:
    """Write `splits.json` atomically."""
    with_labels = any(slide.labels is not None for slide in splits.slides)
    with_targets = bool(splits.targets or splits.covariates or not splits.task.of_classes)
    value = {
        "format": _NAME,
        # The lowest version that can express them, so that older versions read as many files as possible.
        "version": _WITH_TARGETS if with_targets else _WITH_LABELS if with_labels else _PLAIN,
        **(
            {
                "task": splits.task_name,
                "targets": splits.targets,
                "covariates": splits.covariates,
            }
            if with_targets
            else {}
        ),
        "algorithm": splits.algorithm,
        **({} if splits.column is None else {"column": splits.column}),
        "split_by": splits.split_by,
        "seed": splits.seed,
        "fractions": splits.fractions,
        "stores": splits.uuids,
        "classes": splits.classes,
        "counts": splits.count(),
        "slides": [_slide_to_json(slide) for slide in splits.slides],
    }
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=False))


def read_splits(path: Path, stores: Sequence[SampleSource]) -> Splits:
    """Read `splits.json` and compare it with the stores.

    Raises:
        UsageError: the file does not exist.
        DamagedStore: the file is damaged, or a store has other patches.
        UnknownVersion: the file has an unknown version.
    """
    splits = load_splits(path)
    uuids = tuple(store.uuid for store in stores)
    if uuids != splits.uuids:
        raise DamagedStore(
            f"{path} belongs to other stores",
            found=", ".join(uuids),
            expected=", ".join(splits.uuids),
            todo="train on the same stores, in the same order",
        )
    for slide in splits.slides:
        store = stores[slide.store]
        record = store.complete.get(slide.slide)
        actual = record and (record.planned, patches_crc(store, slide.slide))
        if actual != (slide.count, slide.crc):
            raise DamagedStore(
                f"slide {slide.id} of {store.path} does not match {path}",
                found="different patches" if record else "no complete slide with this number",
                todo="start a new run",
            )
    return splits


def load_splits(path: Path) -> Splits:
    """Read `splits.json` without a comparison with its stores. Raise as `read_splits`."""
    with reading(path, missing=UsageError(f"{path} does not exist")):
        return _from_json(read_json(path), path)


def recorded_numbers(path: Path) -> dict[str, int]:
    """Return slide numbers by id from a `splits.json`; empty if it cannot be read, which `read_splits` reports."""
    with suppress(HistopipeError):
        return {slide.id: slide.slide for slide in load_splits(path).slides}
    return {}


def names_of(slide: str, patient: str | None) -> set[tuple[str, str]]:
    """Return the id of a slide and the name of its patient as in `trained_on`."""
    return {("slide", nfc(slide)), ("patient", nfc(patient or slide))}


def trained_on(path: Path) -> set[tuple[str, str]]:
    """Return ("slide", id) and ("patient", name) of all subsets but test, in NFC; empty if the file is unreadable."""
    with suppress(HistopipeError):
        splits = load_splits(path)
        return {
            name
            for subset in SUBSETS
            if subset != "test"
            for slide in splits.slides_on(subset)
            for name in names_of(slide.id, slide.patient)
        }
    return set()


def patches_crc(store: SampleSource, slide: int) -> int:
    """Return the CRC-32 over the CRCs of a slide's patches, which identifies its pixels and their order."""
    return zlib.crc32(np.ascontiguousarray(store.index(slide)["crc"]).tobytes())


def _from_json(value: Mapping[str, Any], path: Path) -> Splits:
    name, version = value["format"], value["version"]
    if name != _NAME or version not in (_PLAIN, _WITH_LABELS, _WITH_TARGETS):
        raise UnknownVersion(
            str(path), found=f"{name} version {version}", expected=f"{_NAME} version 1 to 3"
        )
    splits = Splits(
        split_by=value["split_by"],
        seed=value["seed"],
        fractions=tuple(value["fractions"]),
        uuids=tuple(value["stores"]),
        classes=tuple(value["classes"]),
        slides=tuple(_slide_from_json(slide) for slide in value["slides"]),
        task_name=value.get("task", "classification"),
        targets=tuple(value.get("targets", ())),
        covariates=tuple(value.get("covariates", ())),
        algorithm=str(value.get("algorithm", FIRST_ALGORITHM)),
        column=value.get("column"),
    )
    if splits.task_name not in TASKS:
        raise ValueError(f"unknown task {splits.task_name}")
    texts = (
        splits.split_by,
        splits.column or "",
        *splits.uuids,
        *splits.classes,
        *splits.targets,
        *splits.covariates,
    )
    if not all(isinstance(text, str) for text in texts) or type(splits.seed) is not int:
        raise TypeError("a name or the seed has the wrong type")
    for slide in splits.slides:
        highest = -1 if slide.labels is None else int(slide.labels.max(initial=-1))
        targets, covariates = len(slide.target or ()), len(slide.covariates)
        for problem, is_wrong in {
            "unknown class": slide.label not in splits.classes or highest >= len(splits.classes),
            f"{targets} targets": targets != len(splits.targets),
            f"{covariates} covariates": covariates != len(splits.covariates),
            f"store {slide.store} of {len(splits.uuids)}": slide.store >= len(splits.uuids),
        }.items():
            if is_wrong:
                raise ValueError(f"slide {slide.id}: {problem}")
    return splits


def _slide_to_json(slide: SlideSplit) -> dict[str, Any]:
    subsets, target = set(slide.subsets.tolist()), slide.target
    one = len(subsets) == 1 and subsets != {DROPPED}
    optional = {
        "labels": None if slide.labels is None else _encode_array(slide.labels),
        "target": target and [None if np.isnan(number) else number for number in target],
        "covariates": slide.covariates or None,
        "side": SUBSETS[subsets.pop()] if one else None,
        "sides": None if one else _encode_array(slide.subsets),
    }
    return {
        **{name: getattr(slide, name) for name in _FIELDS},
        **{name: value for name, value in optional.items() if value is not None},
    }


def _slide_from_json(value: Mapping[str, Any]) -> SlideSplit:
    for name, types in _FIELDS.items():
        if type(value[name]) not in types:
            raise TypeError(f"{name}: {value[name]!r}"[:100])
    count = value["count"]
    if not 0 <= count <= _MAX_PATCHES or value["store"] < 0:
        raise ValueError(f"{count} patches of store {value['store']}")
    return SlideSplit(
        **{name: value[name] for name in _FIELDS},
        subsets=np.full(count, SUBSETS.index(value["side"]), np.int8)
        if "side" in value
        else _decode_array(value["sides"], np.int8, count),
        labels=_decode_array(value["labels"], np.int16, count) if "labels" in value else None,
        target=tuple(np.nan if number is None else float(number) for number in value["target"])
        if "target" in value
        else None,
        covariates=tuple(map(str, value.get("covariates", ()))),
    )


def _encode_array(values: NDArray[Any]) -> str:
    little_endian = values.astype(values.dtype.newbyteorder("<")).tobytes()
    return base64.b64encode(zlib.compress(little_endian)).decode()


def _decode_array(text: str, dtype: Any, count: int) -> NDArray[Any]:
    kind = np.dtype(dtype).newbyteorder("<")
    # The size is limited, since damaged data may expand to any size.
    raw = zlib.decompressobj().decompress(base64.b64decode(text), max(1, count * kind.itemsize))
    values = np.frombuffer(raw, kind)
    if len(values) != count:
        raise ValueError(f"{len(values)} values for {count} patches")
    return values
