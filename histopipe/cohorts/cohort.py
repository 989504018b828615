"""Make a labels file from the tables of an archive and the slides on disk, with the reason of each exclusion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from histopipe._version import __version__
from histopipe.annotations.annotation_files import annotation_files, match_files
from histopipe.cohorts.cohort_files import (
    CohortFile,
    barcode_of,
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
from histopipe.slides.slide_files import SlideFile, SlideNames, patient_of
from histopipe.slides.tables import describe_changes
from histopipe.splits.slide_table import Exclusion, SlideEntry
from histopipe.system.files import file_sha256, read_record, writable, write_atomically, write_json
from histopipe.system.output import Progress, Result, aligned, counted, default_progress, some
from histopipe.system.settings import declared_settings, make_settings, takes
from histopipe.system.table_cells import column_key, spreadsheet_damage
from histopipe.system.table_files import read_dicts, write_dicts

COHORT = "cohort.json"
_ROWS, _MISSING, _MANIFEST = "cohort.csv", "missing.txt", "missing-manifest.txt"
_COLUMNS = ("slide", "label", "patient", "site")
_MOST_LABELS, _MOST_SITES = 8, 10
"""Columns and rows of the table of sites."""
_LONGEST_SUFFIX = 5
_RESERVED = ("time", "event", "reason", "detail")
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
        lines = aligned(
            [
                ["files", f"{self.files:,}", ""],
                *([f"  {reason}", f"{count:,}", ""] for reason, count in self.excluded.items()),
                ["slides", f"{self.slides:,}", counted(self.patients, "patient")],
                *(
                    [f"  {label or 'without label'}", f"{slides:,}", counted(patients, "patient")]
                    for label, (slides, patients) in self.labels.items()
                ),
            ]
        )
        if self.sites:
            names = [name for name in self.labels if name][:_MOST_LABELS]
            by_size = sorted(self.sites.items(), key=lambda item: -sum(item[1].values()))
            numbers = [
                [site, sum(counts.values()), *(counts.get(name, 0) for name in names)]
                for site, counts in by_size[:_MOST_SITES]
            ]
            lines += [
                "",
                *aligned([["site", "slides", *names], *([*map(str, n)] for n in numbers)]),
            ]
        further = len(self.sites) - _MOST_SITES
        lines += [f"and {counted(further, 'site')} more"] * (further > 0)
        lines += [f"changed: {text}" for text in self.changes]
        lines += [f"warning: {text}" for text in self.warnings]
        if self.missing:
            lines.append(f"{counted(self.missing, 'file')} to download again: {_MISSING}")
        return "\n".join([*lines, f"{self.out}, {_ROWS}, {COHORT}"])


@takes(declared_settings(CohortOptions))
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
    asked = (options.label, options.event_column[0], *options.time, options.patient, options.site)
    columns = [column_key(name) for name in (*asked, *options.columns) if name]
    tables, digests = read_sources((path for path in paths if path not in folders), columns)
    for text in [f"{table.name}: {table.form}" for table in tables if table.form]:
        progress.message(text)
    listed = list_files(tables, _discover(folders, tables))
    aliases = patient_aliases(tables)
    identify(listed, tables, aliases)
    values = CohortValues(JoinedTables(tables, listed, aliases, options), options)
    for file in listed:
        _exclude_kinds(file, options)
        if file.reason is None:
            values.read(file)
    values.check()
    for file in [file for file in listed if folders and file.slide is None]:
        file.exclude(Exclusion.NOT_ON_DISK)
    check_files(listed, progress, md5=options.check)
    exclude_copies(listed)
    counts = Counter(str(file.reason) for file in listed if file.reason)
    if counts.total() == len(listed):
        raise NothingToDo(
            "no slide is left",
            found=", ".join(f"{reason} {count}" for reason, count in counts.items()) or "no files",
            expected="slides that fulfil all conditions",
            todo="relax --slides or --where, or check the files",
        )
    _complete_cells(listed)
    return _write(labels, listed, digests, options, folders, remarks=values.remarks())


def _complete_cells(files: Sequence[CohortFile]) -> None:
    """Add id, label, patient and site to the cells of files. A slide without a patient is taken for one."""
    names = Counter(file.slide_id for file in files if file.reason is None)
    for file in files:
        # Several files that are not on disk may have one name.
        repeated = file.slide is None and file.file_id and names[file.slide_id] > 1
        slide = f"{file.file_id}/{file.slide_id}" if repeated else file.slide_id
        file.cells = {
            "slide": slide,
            "label": "",
            "patient": file.patient or patient_of(slide),
            "site": file.site,
            **file.cells,
        }


def _check_out(labels: Path, options: CohortOptions) -> None:
    """Check the output and the names of its columns."""
    if labels.suffix != ".csv" or labels.name == _ROWS:
        raise UsageError("--out", found=str(labels), expected="another file that ends in .csv")
    recorded = read_record(labels.with_name(COHORT)) or {}
    if recorded.get("labels", labels.name) != labels.name or (labels.exists() and not recorded):
        raise UsageError(
            f"{labels.parent} has another labels file",
            found=recorded.get("labels", f"{labels.name}, which histopipe cohort did not write"),
            expected=f"no {labels.name}, or one of an earlier call",
            todo="choose another --out, such as cohort/labels.csv",
        )
    names = [column_key(name) for name in options.columns]
    reserved = sorted({*_COLUMNS, *_RESERVED}.intersection(names))
    if reserved or len(set(names)) < len(names):
        raise UsageError(
            "--columns",
            found=", ".join(reserved or names),
            expected=f"different columns, other than {', '.join((*_COLUMNS, *_RESERVED))}",
            todo="leave it out, or rename the column",
        )


def _discover(folders: Sequence[Path], tables: Sequence[SourceTable]) -> list[SlideFile]:
    """Return the slides in folders; none if nothing has been downloaded yet."""
    is_listed = any(table.lists_files for table in tables)
    if not folders and not is_listed:
        raise UsageError(
            "no table lists slides",
            found=some([table.name for table in tables]) or "no file",
            expected="a manifest, sample sheet or list of slides, or a folder of slides",
        )
    with suppress(*[NothingToDo] * is_listed):
        return discover(folders) if folders else []
    return []


def _exclude_kinds(file: CohortFile, options: CohortOptions) -> None:
    """Exclude files that are no slides, or slides of another kind."""
    # Names of slides and series may have dots, too.
    suffix = file.name.rpartition(".")[2] if "." in file.name else ""
    is_other = suffix[:1].isalpha() and len(suffix) <= _LONGEST_SUFFIX
    if file.slide is None and (not file.name or (is_other and not is_slide_name(file.name))):
        file.exclude(Exclusion.NO_SLIDE, suffix or "without a name")
    if options.slides != "all" and (file.kind == "frozen") != (options.slides == "frozen"):
        file.exclude(Exclusion.OTHER_KIND, file.kind or "unknown")


def _write(
    labels: Path,
    files: Sequence[CohortFile],
    digests: Mapping[str, str],
    options: CohortOptions,
    folders: Sequence[Path],
    *,
    remarks: Sequence[str],
) -> CohortResult:
    """Write all files, `cohort.json` last, and return the result."""
    used = sorted(
        (file for file in files if file.reason is None), key=lambda file: file.cells["slide"]
    )
    columns = list(dict.fromkeys(name for file in used for name in file.cells))
    excluded = Counter(file.reason for file in files if file.reason)
    missing = [f for f in files if f.reason in (Exclusion.NOT_ON_DISK, Exclusion.INCOMPLETE)]
    result = CohortResult(
        str(labels),
        len(files),
        len(used),
        len({file.cells["patient"] for file in used}),
        {reason: excluded[reason] for reason in Exclusion if reason in excluded},
        _count_labels(used),
        _count_sites(used),
        [*remarks, *_warnings(used, files, options), *_annotated(folders, used)],
        [*_changes(labels, used)],
        len(missing),
    )
    with writable(labels.parent):
        labels.parent.mkdir(parents=True, exist_ok=True)
        _write_missing(labels.parent, missing)
        details = [name for name in _DETAILS if name not in columns]
        rows = [
            {name: file.cells.get(name) for name in columns}
            | {name: getattr(file, name) or "" for name in details}
            for file in files
        ]
        write_dicts(labels.with_name(_ROWS), rows)
        write_dicts(labels, [file.cells for file in used])
        write_json(
            labels.with_name(COHORT),
            {
                "histopipe": __version__,
                "labels": labels.name,
                "sha256": file_sha256(labels),
                "sources": digests,
                "folders": [str(folder) for folder in folders],
                "options": {
                    name: getattr(options, name) for name in declared_settings(CohortOptions)
                },
                "result": result.to_json(),
            },
        )
    return result


def _write_missing(folder: Path, missing: Sequence[CohortFile]) -> None:
    """Write the files to download again: their names, and a manifest for gdc-client. Remove earlier lists."""
    lines = [
        f"{file.file_id}\t{file.name}\t{file.md5}\t{file.size_bytes or ''}\treleased\n"
        for file in missing
        if is_uuid(file.file_id)
    ]
    manifest = "id\tfilename\tmd5\tsize\tstate\n" + "".join(lines) if lines else ""
    for name, text in (
        (_MISSING, "".join(f"{file.name}\n" for file in missing)),
        (_MANIFEST, manifest),
    ):
        write_atomically(folder / name, text)
        if not text:
            (folder / name).unlink()


def _count_labels(used: Sequence[CohortFile]) -> dict[str, tuple[int, int]]:
    pairs = Counter((file.cells["label"], file.cells["patient"]) for file in used)
    slides = Counter(file.cells["label"] for file in used)
    return {
        label: (slides[label], sum(name == label for name, _ in pairs)) for label in sorted(slides)
    }


def _count_sites(used: Sequence[CohortFile]) -> dict[str, dict[str, int]]:
    counts = Counter((file.cells["site"], file.cells["label"]) for file in used)
    return {
        site: {label: count for (of, label), count in counts.items() if of == site}
        for site in sorted({site for site, _ in counts} - {""})
    }


def _warnings(
    used: Sequence[CohortFile], files: Sequence[CohortFile], options: CohortOptions
) -> Iterator[str]:
    """Yield remarks on a cohort that may bias a model, or are mistakes."""
    slides = Counter(file.cells["patient"] for file in used)
    barcodes = Counter(barcode_of(file.name) for file in used if file.sample_type)
    pairs = sorted({(file.cells["patient"], file.cells["label"]) for file in used})
    labels = {name: [label for _, label in each] for name, each in groupby(pairs, itemgetter(0))}
    projects = Counter(file.project for file in used if file.project)
    remarks = {
        "patient with several slides": [name for name, count in slides.items() if count > 1],
        "patient with several labels": [
            f"{name} ({some(names)})" for name, names in labels.items() if len(names) > 1
        ],
        "site with one label only": [
            site
            for site, counts in _count_sites(used).items()
            if len(counts) == 1 < len({label for _, label in pairs})
        ],
        "slide without a patient, taken for one": [
            file.cells["slide"] for file in used if not file.patient
        ],
        "barcode with several slides": [name for name, count in barcodes.items() if count > 1],
        "project": [f"{name} {count}" for name, count in projects.items() if len(projects) > 1],
        "slide on disk in no table": [
            file.cells["slide"] for file in files if file.reason is Exclusion.IN_NO_TABLE
        ],
    }
    for text, names in remarks.items():
        if names:
            noun, _, what = text.partition(" ")
            yield f"{counted(len(names), noun)} {what}".strip() + f": {some(names, 3)}"
    for column in ("slide", "patient", "site"):
        if text := spreadsheet_damage({file.cells[column] for file in used}):
            yield f"column {column}: {text}"
    if options.label is None and not options.time:
        yield "no --label: the slides have patients and sites only"


def _annotated(folders: Sequence[Path], used: Sequence[CohortFile]) -> Iterator[str]:
    """Yield the number of slides with outlines in each folder, such as CAMELYON's."""
    names = SlideNames(file.cells["slide"] for file in used)
    files = chain.from_iterable(map(annotation_files, folders))
    by_folder = sorted(files, key=lambda path: (path.parent, path))
    for folder, inside in groupby(by_folder, key=lambda path: path.parent):
        with suppress(UsageError):  # several files for a slide, which `annotate` reports
            exact, loose, _ = match_files([*inside], folder, names)
            slides = counted(len(exact | loose), "slide")
            yield f"outlines of {slides}: histopipe annotate STORE {folder}"


def _changes(labels: Path, used: Sequence[CohortFile]) -> Iterator[str]:
    """Yield how the slides differ from those of the labels file that is replaced."""
    if not labels.is_file():
        return
    before = {row["slide"]: row for row in read_dicts(labels) if "slide" in row}
    now = {file.cells["slide"]: file.cells for file in used}
    for what, names in (
        ("new", now.keys() - before.keys()),
        ("no longer in it", before.keys() - now.keys()),
    ):
        if names:
            yield f"{counted(len(names), 'slide')} {what}: {some(sorted(names), 3)}"
    yield from describe_changes(before, now)


def with_cohort(
    slides: Sequence[SlideEntry], labels: str | Path, notify: Callable[[str], None]
) -> list[SlideEntry]:
    """Return the table of slides of a run with the slides that `cohort` excluded, if it wrote the labels file.

    Slides of the table that are not used get the reason of the cohort.
    """
    path = Path(labels)
    record = read_record(path.with_name(COHORT)) or {}
    is_ours = record.get("labels") == path.name and path.is_file()
    if not is_ours or record["sha256"] != file_sha256(path):
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
