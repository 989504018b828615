"""Folders of feature files, opened together: their slides, and the features that are joined for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from histopipe.dataset.options import OnError
from histopipe.errors import DamagedStore, NothingToDo, UsageError
from histopipe.features.feature_file import FeatureHeader, feature_files, read_header
from histopipe.features.joined import SlideFeatures, join
from histopipe.system.csv_files import nfc
from histopipe.system.result import counted

Headers = Mapping[str, FeatureHeader]
"""Headers of feature files by slide id."""


@dataclass(frozen=True, slots=True)
class FeatureSets:
    """The features of slides in one folder, or in several that are joined.

    Attributes:
        headers: those of all files of the first folder.
        parts: joined features of the slides that have some.
        dimensions: features per patch of each set.
        notes: what was left out.
        failed: why the header of a file cannot be read, by slide; only if damage is skipped.
    """

    headers: Headers
    parts: Mapping[str, SlideFeatures]
    dimensions: tuple[int, ...]
    notes: tuple[str, ...]
    failed: Mapping[str, str]

    @classmethod
    def of(cls, folders: Sequence[Path], on_error: OnError = "raise") -> FeatureSets:
        """Open the feature files of folders. Raises as `BagSet`."""
        notes: list[str] = []
        failed: dict[str, str] = {}
        first = folders[0]
        headers = _headers(first, on_error, failed)
        by_name = {nfc(name): name for name in headers}
        other_sets = [
            {
                name if name in headers else by_name.get(nfc(name), name): other[name]
                for name in other
            }
            for other in _other_headers(folders, on_error, failed)
        ]
        dimensions = [
            _common_dimension(feature_set) for feature_set in (_filled(first, headers), *other_sets)
        ]
        parts = _parts(headers, other_sets, folders, notes)
        notes += [f"left out: {reason}" for reason in failed.values()]
        return cls(headers, parts, tuple(dimensions), tuple(notes), failed)


def _headers(folder: Path, on_error: OnError, failed: dict[str, str]) -> dict[str, FeatureHeader]:
    """Return the headers of a folder. If damage is skipped, `failed` gets why one cannot be read."""
    headers = {}
    for name, path in feature_files(folder).items():
        try:
            headers[name] = read_header(path)
        except DamagedStore as error:
            if on_error == "raise":
                raise
            failed[name] = str(error)
    return headers


def _filled(folder: Path, headers: Headers) -> Headers:
    """Return the headers of files with patches."""
    filled = {name: header for name, header in headers.items() if header.rows}
    if not filled:
        if headers:
            raise NothingToDo(
                f"no slide in {folder} has patches", found=", ".join(list(headers)[:3]),
                todo="check the slides: `histopipe ingest SLIDES --plan` lists why slides have no patches",
            )  # fmt: skip
        raise NothingToDo(
            f"{folder} contains no features", expected="files SLIDE.h5 from `histopipe embed`"
        )
    return filled


def _other_headers(
    folders: Sequence[Path], on_error: OnError, failed: dict[str, str]
) -> list[Headers]:
    """Return the headers of all folders but the first."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError("--mil: a folder is given twice", found=", ".join(map(str, folders)))
    return [_filled(folder, _headers(folder, on_error, failed)) for folder in folders[1:]]


def _parts(
    headers: Headers, other_sets: Sequence[Headers], folders: Sequence[Path], notes: list[str]
) -> dict[str, SlideFeatures]:
    """Join the sets of each slide. Add to `notes` what is left out."""
    parts: dict[str, SlideFeatures] = {}
    lost: list[str] = []
    for name, header in headers.items():
        if not header.rows:
            continue
        if not all(name in other for other in other_sets):
            lost.append(name)
            continue
        part = join([header, *(other[name] for other in other_sets)])
        if part.rows:
            parts[name] = part
        else:
            lost.append(name)
    names = " and ".join(map(str, folders))
    if not parts:
        raise NothingToDo(
            f"no slide has patches in all of {names}", found=f"such as {lost[0]}",
            expected="features of the same slides, with overlapping patches",
        )  # fmt: skip
    if lost:
        notes.append(
            f"{counted(len(lost), 'slide')} without common patches in {names} left out: {', '.join(lost[:3])}"
        )
    patches = sum(part.left_out for part in parts.values())
    if patches:
        notes.append(
            f"{counted(patches, 'patch')} of {folders[0]} left out: another set does not cover them"
        )
    return parts


def _common_dimension(headers: Mapping[str, FeatureHeader]) -> int:
    first, *rest = headers.values()
    for header in rest:
        if header.dimension != first.dimension:
            raise UsageError(
                f"{header.path}: features per patch", found=header.dimension,
                expected=f"{first.dimension}, as in {first.path}",
                todo="use one folder per encoder",
            )  # fmt: skip
    return first.dimension
