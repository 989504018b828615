"""Make a labels file from the tables of an archive and the slides on disk, with the reason of each exclusion."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from histopipe._version import __version__
from histopipe.annotations.annotation_files import annotation_files
from histopipe.cohorts.cohort_files import (
    CohortFile,
    check_files,
    exclude_copies,
    identify,
    list_files,
)
from histopipe.cohorts.cohort_values import CohortValues, JoinedTables
from histopipe.cohorts.options import CohortOptions
from histopipe.cohorts.source_tables import (
    SourceTable,
    is_slide_name,
    is_uuid,
    patient_aliases,
    read_sources,
)
from histopipe.errors import NothingToDo, UsageError
from histopipe.slides.discovery import discover
from histopipe.slides.slide_files import SlideFile
from histopipe.slides.tables import SlideNames, describe_changes, patient_of
from histopipe.splits.slide_table import Exclusion, SlideEntry
from histopipe.system.files import read_record, writable, write_atomically, write_json
from histopipe.system.output import Progress, Result, aligned, counted, default_progress, some
from histopipe.system.settings import declared_settings, make_settings
from histopipe.system.table_files import column_key, read_dicts, write_table
from histopipe.system.worker_pool import count_usable_cores

COHORT = "cohort.json"
_ROWS, _MISSING, _MANIFEST = "cohort.csv", "missing.txt", "missing-manifest.txt"
_COLUMNS = ("slide", "label", "patient", "site")
_MOST_LABELS, _MOST_SITES = 8, 10
"""Columns and rows of the table of sites."""
_LONGEST_SUFFIX = 5
_DETAILS = ("name", "file_id", "project", "kind", "sample_type", "reason", "detail")


@dataclass(frozen=True, slots=True, repr=False)
class CohortResult(Result):
    """Result of `cohort`.

    Attributes:
        out: the labels file. `cohort.csv` and `cohort.json` are next to it.
        files: number of files in the tables and on disk.
        slides, patients: numbers in the labels file.
        excluded: number of files by reason.
        labels: number of slides and patients by label.
        sites: number of slides by site and label.
        warnings: remarks on labels, sites and files.
        changes: differences from the labels file that was replaced.
        missing: number of files to download again, in `missing.txt`.
    """

    out: str
    files: int
    slides: int
    patients: int
    excluded: Mapping[str, int]
    labels: Mapping[str, tuple[int, int]]
    sites: Mapping[str, Mapping[str, int]]
    warnings: Sequence[str]
    changes: Sequence[str]
    missing: int

    def __str__(self) -> str:
        rows = [["files", f"{self.files:,}", ""]]
        rows += [[f"  {reason}", f"{count:,}", ""] for reason, count in self.excluded.items()]
        rows += [["slides", f"{self.slides:,}", counted(self.patients, "patient")]]
        rows += [
            [f"  {label or 'without label'}", f"{slides:,}", counted(patients, "patient")]
            for label, (slides, patients) in self.labels.items()
        ]
        lines = aligned(rows)
        if self.sites:
            names = [name for name in self.labels if name][:_MOST_LABELS]
            largest = sorted(self.sites, key=lambda site: -sum(self.sites[site].values()))
            table = [
                [
                    site,
                    str(sum(self.sites[site].values())),
                    *(str(self.sites[site].get(n, 0)) for n in names),
                ]
                for site in largest[:_MOST_SITES]
            ]
            lines += ["", *aligned([["site", "slides", *names], *table])]
            rest = len(largest) - _MOST_SITES
            lines += [f"and {counted(rest, 'site')} more"] if rest > 0 else []
        lines += [f"changed: {text}" for text in self.changes]
        lines += [f"warning: {text}" for text in self.warnings]
        if self.missing:
            lines.append(f"{counted(self.missing, 'file')} to download again: {_MISSING}")
        return "\n".join([*lines, f"{self.out}, {_ROWS}, {COHORT}"])


def cohort(
    files: str | Path | Sequence[str | Path],
    out: str | Path = "labels.csv",
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> CohortResult:
    """Make a labels file from the tables of an archive and the slides on disk. Nothing is downloaded.

    Each row of a table that lists files, and each slide in the folders, is in the labels file or is excluded for one
    reason, which `cohort.csv` has. A participant flow of a run with the labels file begins with them.

    Args:
        files: tables (CSV, TSV, XLSX, JSON, and .tar.gz of these) and folders of slides. `FILE.xlsx#SHEET` names a sheet.
        out: the labels file; with `cohort.csv` and `cohort.json` in its folder, and `missing.txt` and
            `missing-manifest.txt` (for gdc-client) if files are missing or damaged.
        progress: shows the progress; `default_progress()` if None.
        settings: options by name, as in docs/reference/settings.md and as the flags of `histopipe cohort`.

    Returns:
        Numbers of files, slides and patients by reason, label and site, and warnings.

    Raises:
        UsageError: a file, an option or a value is wrong, or tables contradict each other.
        NothingToDo: there are no files, or no slide is left.

    Example:
        >>> cohort(["gdc_sample_sheet.tsv", "clinical.tsv", "slides"], label="ajcc_pathologic_stage")  # doctest: +SKIP
    """
    options = make_settings(CohortOptions, settings)
    progress, labels = progress or default_progress(), Path(out)
    paths = [Path(path) for path in ([files] if isinstance(files, str | Path) else files)]
    folders = [path for path in paths if path.is_dir()]
    _check_out(labels, options)
    tables, digests = read_sources(path for path in paths if path not in folders)
    for table in tables:
        if table.form:
            progress.message(f"{table.name}: {table.form}")
    listed = list_files(tables, _discover(folders, tables))
    aliases = patient_aliases(tables)
    identify(listed, tables, aliases)
    values = CohortValues(JoinedTables(tables, listed, aliases, options), options)
    cells: dict[int, dict[str, str]] = {}
    for number, file in enumerate(listed):
        _exclude_kinds(file, options)
        if file.reason is None:
            cells[number] = values.read(file)
    values.check()
    if folders:
        for file in listed:
            if file.slide is None:
                file.exclude(Exclusion.NOT_ON_DISK)
        workers = options.workers or count_usable_cores()
        check_files(listed, md5=options.check, workers=workers, progress=progress)
    exclude_copies(listed)
    names = Counter(file.slide_id for file in listed if file.reason is None)
    rows = [
        _Row(file, _id_of(file, names), cells.get(number, {})) for number, file in enumerate(listed)
    ]
    if not any(row.is_used for row in rows):
        counts = Counter(str(file.reason) for file in listed)
        raise NothingToDo(
            "no slide is left",
            found=", ".join(f"{reason} {count}" for reason, count in counts.items()) or "no files",
            expected="slides that fulfil all conditions",
            todo="relax --slides or --where, or check the files",
        )
    return _write(labels, rows, digests, options, folders)


@dataclass(frozen=True)
class _Row:
    """A file with its slide id and its cells in the labels file."""

    file: CohortFile
    slide: str
    cells: Mapping[str, str]

    @property
    def is_used(self) -> bool:
        """Whether it is in the labels file."""
        return self.file.reason is None

    @cached_property
    def patient(self) -> str:
        """Its patient; without one, its slide."""
        return self.cells.get("patient") or self.file.patient or patient_of(self.slide)

    @cached_property
    def values(self) -> dict[str, str]:
        """Cells of the labels file."""
        site = self.cells.get("site") or self.file.site
        return {
            **{"slide": self.slide, "label": "", "patient": self.patient, "site": site},
            **{name: cell for name, cell in self.cells.items() if name not in ("patient", "site")},
        }


def _check_out(labels: Path, options: CohortOptions) -> None:
    """Check the output and the names of its columns."""
    if labels.suffix != ".csv":
        raise UsageError("--out", found=str(labels), expected="a file that ends in .csv")
    recorded = read_record(labels.with_name(COHORT)) or {}
    if recorded.get("labels", labels.name) != labels.name:
        raise UsageError(
            f"{labels.parent} has the cohort of another labels file",
            found=recorded["labels"],
            expected=labels.name,
            todo="write each cohort into a folder of its own",
        )
    names = [column_key(name) for name in options.columns]
    reserved = sorted({*_COLUMNS, "time", "event"}.intersection(names))
    if reserved or len(set(names)) < len(names):
        raise UsageError(
            "--columns",
            found=", ".join(reserved or names),
            expected=f"different columns, other than {', '.join(_COLUMNS)}, time and event",
            todo="leave it out, or rename the column",
        )


def _discover(folders: Sequence[Path], tables: Sequence[SourceTable]) -> list[SlideFile]:
    """Return the slides in folders; none if nothing has been downloaded yet."""
    if not folders and not any(table.lists_files for table in tables):
        raise UsageError(
            "no table lists slides",
            found=some([table.name for table in tables]) or "no file",
            expected="a manifest, sample sheet or list of slides, or a folder of slides",
        )
    try:
        return discover(folders) if folders else []
    except NothingToDo:
        if not any(table.lists_files for table in tables):
            raise
        return []


def _exclude_kinds(file: CohortFile, options: CohortOptions) -> None:
    """Exclude files that are no slides, or slides of another kind."""
    suffix = file.name.rpartition(".")[2] if "." in file.name else ""
    if file.slide is None and 0 < len(suffix) <= _LONGEST_SUFFIX and not is_slide_name(file.name):
        file.exclude(Exclusion.NO_SLIDE, suffix)
    is_frozen = file.kind == "frozen"
    if options.slides != "all" and is_frozen != (options.slides == "frozen"):
        file.exclude(Exclusion.OTHER_KIND, file.kind or "unknown")


def _id_of(file: CohortFile, names: Mapping[str, int]) -> str:
    """Return the id of a slide; if several files that are not on disk have one name, it begins with the folder of GDC."""
    repeated = file.slide is None and file.file_id and names[file.slide_id] > 1
    return f"{file.file_id}/{file.slide_id}" if repeated else file.slide_id


def _write(
    labels: Path,
    rows: Sequence[_Row],
    digests: Mapping[str, str],
    options: CohortOptions,
    folders: Sequence[Path],
) -> CohortResult:
    """Write all files, `cohort.json` last, and return the result."""
    used = sorted((row for row in rows if row.is_used), key=lambda row: row.slide)
    columns = list(dict.fromkeys([*_COLUMNS, *(name for row in used for name in row.cells)]))
    excluded = Counter(row.file.reason for row in rows if row.file.reason)
    missing = [
        row for row in rows if row.file.reason in (Exclusion.NOT_ON_DISK, Exclusion.INCOMPLETE)
    ]
    result = CohortResult(
        str(labels),
        len(rows),
        len(used),
        len({row.patient for row in used}),
        {reason: excluded[reason] for reason in Exclusion if reason in excluded},
        _count_labels(used),
        _count_sites(used),
        [*_warnings(used, rows, options), *_annotated(folders, used)],
        [*_changes(labels, used)],
        len(missing),
    )
    with writable(labels.parent):
        labels.parent.mkdir(parents=True, exist_ok=True)
        _write_missing(labels.parent, missing)
        write_table(
            labels.with_name(_ROWS),
            [*columns, *_DETAILS],
            (
                [
                    *(row.values.get(name, "") for name in columns),
                    *(getattr(row.file, name) or "" for name in _DETAILS),
                ]
                for row in rows
            ),
        )
        write_table(
            labels, columns, ([row.values.get(name, "") for name in columns] for row in used)
        )
        write_json(
            labels.with_name(COHORT),
            {
                "histopipe": __version__,
                "labels": labels.name,
                "sha256": _sha256(labels),
                "sources": digests,
                "folders": [str(folder) for folder in folders],
                "options": {
                    name: getattr(options, name) for name in declared_settings(CohortOptions)
                },
                "result": result.to_json(),
            },
        )
    return result


def _write_missing(folder: Path, missing: Sequence[_Row]) -> None:
    """Write the files to download again: their names, and a manifest for gdc-client. Remove earlier lists."""
    names = "".join(f"{row.file.name}\n" for row in missing)
    lines = [
        f"{file.file_id}\t{file.name}\t{file.md5}\t{file.size_bytes or ''}\treleased\n"
        for file in (row.file for row in missing)
        if is_uuid(file.file_id)
    ]
    manifest = "id\tfilename\tmd5\tsize\tstate\n" + "".join(lines) if lines else ""
    for name, text in ((_MISSING, names), (_MANIFEST, manifest)):
        if text:
            write_atomically(folder / name, text)
        else:
            (folder / name).unlink(missing_ok=True)


def _count_labels(used: Sequence[_Row]) -> dict[str, tuple[int, int]]:
    patients = defaultdict[str, list[str]](list)
    for row in used:
        patients[row.values["label"]].append(row.patient)
    return {label: (len(names), len(set(names))) for label, names in sorted(patients.items())}


def _count_sites(used: Sequence[_Row]) -> dict[str, dict[str, int]]:
    sites = defaultdict[str, Counter[str]](Counter)
    for row in used:
        if row.values["site"]:
            sites[row.values["site"]][row.values["label"]] += 1
    return {site: dict(counts) for site, counts in sorted(sites.items())}


def _warnings(used: Sequence[_Row], rows: Sequence[_Row], options: CohortOptions) -> Iterator[str]:
    """Yield remarks on a cohort that may bias a model, or are mistakes."""
    slides, labels = Counter(row.patient for row in used), defaultdict[str, set[str]](set)
    for row in used:
        labels[row.patient].add(row.values["label"])
    several = len(set().union(*labels.values())) > 1
    projects = Counter(row.file.project for row in used if row.file.project)
    found = {
        "patient with several slides": [name for name, count in slides.items() if count > 1],
        "patient with several labels": [
            f"{name} ({some(sorted(own))})" for name, own in labels.items() if len(own) > 1
        ],
        "site with one label only": [
            site for site, counts in _count_sites(used).items() if several and len(counts) == 1
        ],
        "slide without a patient, taken for one": [
            row.slide for row in used if not (row.cells.get("patient") or row.file.patient)
        ],
        "project": [f"{name} {count}" for name, count in projects.items() if len(projects) > 1],
        "slide on disk in no table": [
            row.slide for row in rows if row.file.reason is Exclusion.IN_NO_TABLE
        ],
    }
    for text, names in found.items():
        if names:
            noun, _, what = text.partition(" ")
            yield f"{counted(len(names), noun)} {what}".strip() + f": {some(names, 3)}"
    if options.label is None:
        yield "no --label: the slides have patients and sites only"


def _annotated(folders: Sequence[Path], used: Sequence[_Row]) -> Iterator[str]:
    """Yield the number of slides with outlines in each folder, such as CAMELYON's."""
    names = SlideNames(row.slide for row in used)
    counts = defaultdict[Path, set[str]](set)
    for path in (path for folder in folders for path in annotation_files(folder)):
        with suppress(UsageError):  # the name of several slides
            if (name := names.find(path.stem, where=str(path))) is not None:
                counts[path.parent].add(name)
    for folder, found in counts.items():
        yield f"outlines of {counted(len(found), 'slide')}: histopipe annotate STORE {folder}"


def _changes(labels: Path, used: Sequence[_Row]) -> Iterator[str]:
    """Yield how the slides differ from those of the labels file that is replaced."""
    if not labels.is_file():
        return
    before = {row["slide"]: row for row in read_dicts(labels) if "slide" in row}
    now = {row.slide: row.values for row in used}
    for what, names in (
        ("new", now.keys() - before.keys()),
        ("no longer in it", before.keys() - now.keys()),
    ):
        if names:
            yield f"{counted(len(names), 'slide')} {what}: {some(sorted(names), 3)}"
    yield from describe_changes(before, now)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_cohort(
    slides: Sequence[SlideEntry], labels: str | Path, notify: Callable[[str], None]
) -> list[SlideEntry]:
    """Return the table of slides of a run with the slides that `cohort` excluded, if it wrote the labels file.

    Slides of the table that are not used get the reason of the cohort.
    """
    path = Path(labels)
    record = read_record(path.with_name(COHORT)) or {}
    is_ours = record.get("labels") == path.name and path.is_file()
    if not is_ours or record["sha256"] != _sha256(path):
        if is_ours:
            notify(
                f"{path} is not as histopipe cohort wrote it: the flow begins without the cohort"
            )
        return [*slides]
    by_name, names = {slide.slide: slide for slide in slides}, SlideNames(s.slide for s in slides)
    for row in read_dicts(path.with_name(_ROWS)):
        name = None
        with suppress(UsageError):  # the name of several slides
            name = names.find(row["slide"], where=str(path))
        entry = by_name.get(name or row["slide"])
        if row["reason"] and (entry is None or entry.reason is not None):
            entry = entry or SlideEntry(slide=row["slide"], patient=row["patient"])
            reason = Exclusion(row["reason"])
            by_name[entry.slide] = replace(entry, reason=reason, patient=row["patient"])
    return [*by_name.values()]
