"""What the viewer shows: the slides of the given stores, runs, predictions and slide files, joined by slide id.

The annotations of a slide are read and saved as GeoJSON of QuPath, for drawing.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.annotations.annotation_files import (
    GEOJSON,
    SUFFIXES,
    XML,
    annotation_files,
    file_bytes,
    match_files,
    read_annotations,
    read_features,
    read_geojson,
)
from histopipe.annotations.regions import geojson_features
from histopipe.errors import HistopipeError, NothingToDo, UsageError
from histopipe.evaluation.label_errors import LABEL_ERRORS, read_label_errors
from histopipe.features.feature_file import feature_files
from histopipe.predictions.sources import PredictedSlide, PredictionSource
from histopipe.runs import folder as run_folder
from histopipe.runs.run import Run, open_source
from histopipe.slides.discovery import discover
from histopipe.slides.slide_files import SlideNames
from histopipe.store.record import SlideRecord, SlideState
from histopipe.store.store import Store, parts_of
from histopipe.system.files import Closing, path_within, run_on_error, write_atomically
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.locks import locked


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A slide of the list. At least one of `store`, `file` and `predicted` is given.

    Attributes:
        name: name that is shown, unique: the slide's id, with a part of the store's uuid if two stores have this id.
        id: the slide's id.
        store, number, record: its store, its number there, and its record.
        file: the slide's file, if it exists.
        predicted: its geometry as recorded by `histopipe predict`.
    """

    name: str
    id: str
    store: Store | None = None
    number: int = 0
    record: SlideRecord | None = None
    file: Path | None = None
    predicted: PredictedSlide | None = None

    @property
    def complete(self) -> bool:
        """Whether the store has its patches."""
        return self.record is not None and self.record.state is SlideState.COMPLETE

    @property
    def store_path(self) -> str:
        """Path of its store; empty without one."""
        return "" if self.store is None else str(self.store.path.resolve())

    @property
    def side_l0(self) -> float:
        """Side of its patches in level-0 pixels; 0 if unknown."""
        if self.record is not None and self.complete:
            return self.record.side_l0
        return self.predicted.size_l0 if self.predicted else 0.0

    @property
    def state(self) -> str:
        """State in the store; "not ingested" without a record."""
        return str(self.record.state) if self.record else "not ingested"


@dataclass(slots=True)
class Collection(Closing):
    """All slides and predictions that are shown.

    Attributes:
        entries: slides, sorted by name.
        stores: open stores.
        predictions: runs and prediction folders.
        label_errors: labels to check, the least probable first, by name of the cross-validation.
        features: feature files by slide id.
        notes: what could not be opened, for the user.
    """

    entries: list[Entry] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    predictions: list[PredictionSource] = field(default_factory=list)
    label_errors: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    features: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> dict[str, str]:
        """Name in the list by slide id; of slides in several stores, the first complete one."""
        by_preference = sorted(self.entries, key=lambda entry: not entry.complete)
        # The last entry of an id counts.
        return {entry.id: entry.name for entry in reversed(by_preference)}

    def close(self) -> None:
        """Close the stores."""
        for store in self.stores:
            store.close()


def open_collection(
    paths: Sequence[Path],
    *,
    stores: Sequence[Path] = (),
    features: Path | None = None,
    untrusted: bool = False,
) -> Collection:
    """Open stores, runs, prediction folders and slides. With `untrusted`, no path that is named in them is followed.

    Raises:
        UsageError: a path is none of these, or a run has not finished.
        NothingToDo: there is no slide, or the stores of a run cannot be found.
        DamagedStore: a store or predictions cannot be read.
    """
    collection = Collection()
    with run_on_error(collection.close):
        runs, store_paths, slides = _sort_paths(paths)
        collection.predictions = [
            _open_predictions(path, name) for path, name in _short_names(runs).items()
        ]
        checks = [path for path in paths if (path / LABEL_ERRORS).exists()]
        collection.label_errors = {
            name: read_label_errors(path) for path, name in _short_names(checks).items()
        }
        for path in (*store_paths, *stores):
            _open_store(collection, path)
        if not untrusted:
            _open_stores_of_runs(collection, explicit=bool(store_paths or stores))
        files = {slide.id: slide.path for slide in discover(slides)} if slides else {}
        collection.entries = _entries(collection, files, untrusted=untrusted)
        if features is not None:
            collection.features = feature_files(features)
            if not collection.features:
                raise UsageError(
                    f"{features} has no features", expected="a folder of `histopipe embed`"
                )
        if not collection.entries:
            raise NothingToDo(
                f"no slide in {', '.join(map(str, paths))}",
                todo="pass the store of the patches, too",
            )
    return collection


def _sort_paths(paths: Iterable[Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """Return runs and predictions, stores, and the paths of slides. A cross-validation is replaced by its folds."""
    runs: list[Path] = []
    stores: list[Path] = []
    slides: list[Path] = []
    for path in paths:
        match folder_kind(path):
            case FolderKind.CROSS_VALIDATION:
                runs += filter(run_folder.has_begun, run_folder.runs_of(path))
            case FolderKind.RUN | FolderKind.PREDICTIONS:
                runs.append(path)
            case FolderKind.STORE | FolderKind.PARTS:
                stores.append(path)
            case FolderKind.FEATURES:
                raise UsageError(
                    f"{path} has features, which are no pictures",
                    todo=f"pass the store, with --features {path}",
                )
            case _:
                slides.append(path)
    return runs, stores, slides


def _open_predictions(path: Path, name: str) -> PredictionSource:
    """Open a run, or a folder of `histopipe predict`, which must have slides."""
    source = open_source(path, name)
    if not isinstance(source, Run) and not source.predicted_slides:
        raise NothingToDo(f"{path} has no predicted slides", todo="run histopipe predict again")
    return source


def _short_names(folders: Iterable[Path]) -> dict[Path, str]:
    """Return a short name of each folder: its own, with as many parent folders as make it unique."""
    parts = {path: path.resolve().parts for path in folders}
    endings = Counter(p[-n:] for p in set(parts.values()) for n in range(1, len(p) + 1))
    return {
        path: "/".join(next(p[-n:] for n in range(1, len(p) + 1) if endings[p[-n:]] == 1))
        for path, p in parts.items()
    }


def _open_store(collection: Collection, path: Path) -> None:
    opened = {store.path.resolve() for store in collection.stores}
    for part in parts_of(path):
        if part.resolve() not in opened:
            collection.stores.append(
                Store(part)
            )  # one by one: if a store fails, the others are closed


def _open_stores_of_runs(collection: Collection, *, explicit: bool) -> None:
    """Open the stores that the runs name. If that of a patch model is missing and no store was given, this is an error."""
    for run in [source for source in collection.predictions if isinstance(source, Run)]:
        try:
            for path in run.store_paths:
                _open_store(collection, path)
        except HistopipeError as error:
            if not explicit and run.of_patches:
                raise NothingToDo(
                    f"the store of the run {run.folder} cannot be opened",
                    found=str(error),
                    todo="pass its new path with --store",
                ) from error
            collection.notes.append(f"{run.folder}: {error}")


def _entries(collection: Collection, files: dict[str, Path], *, untrusted: bool) -> list[Entry]:
    """Return the slides of the stores, and slides that only have a file or predictions, sorted by name."""
    count = Counter(record.id for store in collection.stores for record in store.slides)
    predicted = {
        name: slide
        for predictions in collection.predictions
        for name, slide in predictions.predicted_slides.items()
    }
    entries = [
        Entry(
            record.id if count[record.id] == 1 else f"{record.id}@{store.uuid[:8]}",
            record.id,
            store,
            number,
            record,
            files.get(record.id)
            or (files.get(record.id.rpartition("/")[0]) if record.scan else None)
            or next(
                # The paths that a record names may be those of another machine.
                filter(
                    Path.is_file,
                    [] if untrusted else map(Path, (record.resolved_path, record.path)),
                ),
                None,
            ),
            predicted.get(record.id),
        )
        for store in collection.stores
        for number, record in store.records.items()
    ]
    entries += [
        Entry(name, name, file=files.get(name), predicted=predicted.get(name))
        for name in {**files, **predicted}
        if name not in count
    ]
    return sorted(entries, key=lambda entry: entry.name)


def list_row(entry: Entry) -> dict[str, Any]:
    """Return the row of a slide in the list."""
    record, predicted = entry.record, entry.predicted
    return {
        "name": entry.name,
        "id": entry.id,
        "state": entry.state,
        "error": getattr(record, "error", None),
        "patient": getattr(record, "patient", None) or getattr(predicted, "patient", None),
        "label": getattr(record, "label", None) or getattr(predicted, "label", None),
        "site": getattr(record, "site", None),
        "patches": record.stored if record else getattr(predicted, "patches", 0),
        "file": entry.file is not None,
    }


PREVIOUS = ".previous"
"""Suffix of the previous version of a file. No command reads files with it."""
_LOCK_SECONDS = 5.0
"""Time to wait for another viewer that saves into the folder."""
_MOST_NESTED = 100
"""Most levels of nested objects; deeper ones cannot be sent again."""


class ChangedMeanwhile(UsageError):
    """The file was changed after it was loaded."""


def read_drawing(
    folder: Path, slide: str, names: SlideNames, corner: tuple[int, int]
) -> dict[str, Any]:
    """Read the annotations of a slide.

    Args:
        folder: folder of the annotations.
        slide: id of the slide.
        names: names of all slides: a file with the exact name of one of them belongs to no other.
        corner: x and y of its scanned area, level-0 pixels.

    Returns:
        `features`: GeoJSON features as in the file; those that are not areas are kept, but not shown. `version` identifies
        the content of the file; it is empty if there is none. `file`: name of the file, or of the file that is written
        first. `origin`: level-0 pixel of the coordinates' origin.

    Raises:
        UsageError: the file cannot be read, or there are two.
    """
    path, _ = existing_file(folder, slide, names)
    features: Sequence[Mapping[str, Any]] = []
    version, name = "", f"{slide}{GEOJSON[0]}"
    if path is not None:
        outlines = read_annotations(path)  # checks the content
        data = file_bytes(path)
        version, name = version_of(data), path.relative_to(folder).as_posix()
        if path.suffix.lower() in GEOJSON:
            features = list(read_features(data))
            _check_depth(features)
        else:
            features = geojson_features(outlines, corner)
    return {"features": features, "version": version, "file": name, "origin": corner}


def save_drawing(  # noqa: PLR0917 - called in a thread
    folder: Path,
    slide: str,
    names: SlideNames,
    body: bytes | bytearray,
    suffixes: Iterable[tuple[str, ...]] = (SUFFIXES,),
    merge: Callable[[list[Any]], list[Any]] | None = None,
) -> dict[str, Any]:
    """Write the annotations of a slide by one rename, and return their version and the name of the file.

    They are written to the file that has them, else to SLIDE.geojson. The previous file is kept with the suffix
    `.previous`. An XML file with the name of the slide is replaced, since two files of one slide are an error.

    Args:
        folder: folder of the annotations.
        slide: id of the slide.
        names: names of all slides; see `read_drawing`.
        body: JSON with the GeoJSON features, and the version of the file that was loaded.
        suffixes: see `existing_file`. A PNG file is kept.
        merge: returns the features to write, which are then returned, too.

    Raises:
        UsageError: the features are not valid GeoJSON.
        ChangedMeanwhile: the file has another version.
        OSError: the file cannot be written.
    """
    try:
        value = json.loads(body)
        features, version = value["features"], str(value["version"])
        _check_depth(value)
        data = json.dumps(features, ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError("the request is not a drawing", found=repr(error)[:100]) from error
    read_geojson(data)
    if merge is not None:
        features = merge(features)
    data = json.dumps(
        {"type": "FeatureCollection", "features": features},
        ensure_ascii=False,
        separators=(",", ":"),
    ).encode()
    target = path_within(folder, f"{slide}{GEOJSON[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, wait_seconds=_LOCK_SECONDS):
        existing, exact = existing_file(folder, slide, names, suffixes)
        if existing and existing.suffix.lower() in GEOJSON:
            target = existing
        current = version_of(file_bytes(existing)) if existing else ""
        if current != version:
            raise ChangedMeanwhile(
                f"the outlines of {slide} were changed meanwhile, in another tab or program"
            )
        if existing and existing.suffix.lower() in SUFFIXES:
            write_atomically(existing.with_name(existing.name + PREVIOUS), file_bytes(existing))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data)
        if existing and existing.suffix.lower() in XML and exact:
            existing.unlink()  # kept with the suffix
    return {
        "version": version_of(data),
        "file": target.relative_to(folder).as_posix(),
        "features": features if merge is not None else None,
    }


def existing_file(
    folder: Path,
    slide: str,
    names: SlideNames,
    suffixes: Iterable[tuple[str, ...]] = (SUFFIXES,),
) -> tuple[Path | None, bool]:
    """Return the file that `annotate` or `ingest` uses for a slide, and whether it has the exact name of the slide.

    Of several groups of suffixes, the first one that has a file counts.

    Raises:
        UsageError: there are two.
    """
    for group in suffixes if folder.is_dir() else ():
        exact, loose, _ = match_files(annotation_files(folder, group), folder, names)
        if slide in exact or slide in loose:
            return (loose | exact)[slide], slide in exact
    return None, False


def _check_depth(value: Any, left: int = _MOST_NESTED) -> None:
    if not left:
        raise UsageError("the drawing is nested too deep", expected="GeoJSON")
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            _check_depth(part, left - 1)


def version_of(data: bytes) -> str:
    """Return what identifies the content of a file."""
    return f"{zlib.crc32(data):08x}-{len(data)}"
