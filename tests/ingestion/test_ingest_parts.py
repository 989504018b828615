"""Ingest in parts: any division gives the slides of one ingest, and nothing complete is lost or ingested again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import lmdb
import pytest

from helpers.commands import COMMAND, RunCommand, small_disk
from helpers.slides import make_slides
from helpers.stores import a_store, jpegs, read_slides
from helpers.tissue_files import write_coords
from histopipe.diagnostics.info import info
from histopipe.errors import (
    DamagedStore,
    MachineShort,
    NothingToDo,
    UnknownVersion,
    UsageError,
)
from histopipe.ingestion.ingest import import_coords, ingest
from histopipe.ingestion.ingest_parts import IngestParts
from histopipe.ingestion.ingest_report import IngestReport, SlideStatus
from histopipe.ingestion.options import IngestPartOptions
from histopipe.maintenance.merge import merge
from histopipe.maintenance.store_info import StoreInfo
from histopipe.maintenance.verify import verify
from histopipe.reports.report import report as report_of
from histopipe.store.record import SlideState
from histopipe.store.store import Catalog, Store, parts_of, read_catalog, recorded
from histopipe.system.files import atomic_write
from histopipe.system.folders import CATALOG
from histopipe.system.output import Progress

SLIDES = 7
TILING: dict[str, Any] = {"patch_size": 64, "tissue": "none"}
COORDS = {
    "patch_size": 16,
    "patch_size_level0": 16,
    "level0_magnification": 20,
    "target_magnification": 20,
    "overlap": 0,
}


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    """Folder of slides, all with the pixels of two."""
    folder = tmp_path / "slides"
    make_slides(folder, "--count", "2", "--size", "512x512")
    for number in range(2, SLIDES):
        for suffix in ("svs", "geojson"):
            source = folder / f"slide-00{number % 2}.{suffix}"
            shutil.copy(source, folder / f"slide-00{number}.{suffix}")
    rows = [f"slide-00{number},{'nt'[number % 2]}\n" for number in range(SLIDES)]
    (folder / "labels.csv").write_text("slide,label\n" + "".join(rows))
    return folder


def do(slides: Path, *parts: str, join: bool = True, **settings: Any) -> IngestReport:
    """Ingest parts into the folder `parts`, and join them."""
    folder = slides.parent
    values: dict[str, Any] = {
        **TILING,
        "scratch": folder / "scratch",
        "progress": Progress(),
        **settings,
    }
    reports = [ingest(slides, folder / "parts", part=part, **values) for part in parts]
    return ingest(slides, folder / "parts", join=True, **values) if join else reports[-1]


def statuses(report: IngestReport) -> dict[str, str]:
    return {slide.id[-3:]: str(slide.status) for slide in report.slides}


def check(folder: Path, expected: object) -> None:
    """Check that every slide is in one store of the folder, equal to that of one ingest."""
    slides: dict[str, Any] = {}
    assert verify(parts_of(folder)[0], workers=1).findings == []
    for part in parts_of(folder):
        here = read_slides(part)
        assert not slides.keys() & here.keys()
        slides |= here
    assert slides == expected
    assert not (folder.parent / "scratch").exists() or not any(
        (folder.parent / "scratch").iterdir()
    )


pytestmark = pytest.mark.usefixtures("inline_workers")


def test_parts_equal_one_ingest_whatever_the_division(slides: Path, tmp_path: Path) -> None:
    plain = ingest(slides, tmp_path / "plain.lmdb", progress=Progress(), **TILING)
    expected = read_slides(tmp_path / "plain.lmdb")
    parts = tmp_path / "parts"
    # The first of three parts, a new division, and the rest by a command without a part.
    first = do(slides, "1/3", join=False, part_gb=1e-6)  # one store per slide
    assert 0 < len(first.slides) < SLIDES
    assert len([*parts.glob("part-*.lmdb")]) == len(first.slides)
    assert read_catalog(parts) is None
    with pytest.raises(UsageError, match=r"slide-00\d is not done"):
        do(slides)
    fifths = [do(slides, f"{number}/5", join=False) for number in (1, 2, 3)]
    assert {s.id for s in fifths[0].of(SlideStatus.SKIPPED)} <= {s.id for s in first.slides}
    report = ingest(slides, parts, progress=Progress(), scratch=tmp_path / "scratch", **TILING)
    check(parts, expected)
    assert statuses(report).keys() == statuses(plain).keys()
    assert [replaced(slide) for slide in report.slides] == [replaced(s) for s in plain.slides]
    joined, whole = info(parts), info(tmp_path / "plain.lmdb")
    assert isinstance(joined, StoreInfo) and isinstance(whole, StoreInfo)
    assert (joined.patches, joined.states, joined.labels) == (
        whole.patches,
        whole.states,
        whole.labels,
    )
    assert sorted(slide["id"] for slide in joined.slides) == sorted(expected)
    page = report_of(parts, out=tmp_path / "page.html", pictures=False, progress=Progress())
    assert f"{whole.patches:,}" in page.file.read_text()
    merge([parts], tmp_path / "merged.lmdb", progress=Progress())
    assert read_slides(tmp_path / "merged.lmdb") == expected
    # Nothing is ingested again.
    again = do(slides, "1/2", "2/2")
    assert set(statuses(again).values()) == {"skipped"}
    check(parts, expected)


def replaced(slide: Any) -> tuple[Any, ...]:
    return slide.id, slide.path, slide.patches, slide.stored_bytes, slide.route, slide.notes


def test_labels_annotations_and_replaced_slides(slides: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("slide,label,patient\nslide-000,a,p1\n")
    assert set(statuses(do(slides, "1/2", "2/2", labels=tmp_path / "labels.csv")).values()) == {
        "complete"
    }
    shutil.copy(slides / "slide-001.svs", slides / "slide-000.svs")
    (slides / "labels.csv").unlink()
    assert "changed" in do(slides, "1/2", "2/2").failed["slide-000"]
    # Labels of the earlier ingest are kept. The newest store of a slide counts.
    assert statuses(do(slides, "1/3", "2/3", "3/3", force=True))["000"] == "complete"
    records = {record.id: record for record in recorded(tmp_path / "parts").values()}
    assert (records["slide-000"].label, records["slide-000"].patient) == ("a", "p1")
    assert records["slide-000"].tile_hash == records["slide-001"].tile_hash
    do(slides, annotations=slides)
    records = {record.id: record for record in recorded(tmp_path / "parts").values()}
    assert len(records) == SLIDES and all(sum(r.patch_labels.values()) for r in records.values())
    (tmp_path / "labels.csv").write_text("slide,label\n" + "slide-003,new\n")
    do(slides, labels=tmp_path / "labels.csv")
    assert {r.id: r.label for r in recorded(tmp_path / "parts").values()}["slide-003"] == "new"


def test_the_newest_store_counts_also_by_a_clock_that_is_behind(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Behind(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(hours=1)

    do(slides, "1/1")
    shutil.copy(slides / "slide-001.svs", slides / "slide-000.svs")
    (slides / "slide-002.svs").write_bytes(b"no slide any more")
    monkeypatch.setattr("histopipe.store.writer.datetime", Behind)
    report = do(slides, "1/2", "2/2", force=True)
    assert [*report.failed] == ["slide-002"] and statuses(report)["000"] == "complete"
    records = {record.id: record for record in recorded(tmp_path / "parts").values()}
    assert records["slide-000"].tile_hash == records["slide-001"].tile_hash
    assert records["slide-002"].state is SlideState.FAILED


def test_failed_slides_fail_alone(slides: Path, tmp_path: Path) -> None:
    good = (slides / "slide-004.svs").read_bytes()
    (slides / "slide-004.svs").write_bytes(b"no slide")
    report = do(slides, "1/2", "2/2")
    assert [*report.failed] == ["slide-004"] and report.exit_code == 3
    (slides / "slide-004.svs").write_bytes(good)
    report = do(slides, "1/3", "2/3", "3/3")
    assert not report.failed and statuses(report)["004"] == "complete"


def test_other_settings_and_wrong_folders_are_refused(slides: Path, tmp_path: Path) -> None:
    do(slides, "1/2", join=False)
    with pytest.raises(UsageError, match="was created with other settings"):
        do(slides, "2/2", join=False, patch_size=32)
    (part,) = (tmp_path / "parts").glob("part-*.lmdb")
    part.rename(tmp_path / "elsewhere")  # as if the other part had begun at the same time
    with pytest.raises(UsageError, match="computed with other settings: found patch_size 64"):
        do(slides, "2/2", join=False, patch_size=32)
    (tmp_path / "elsewhere").rename(part)
    with pytest.raises(NothingToDo, match="with --join"):
        merge([tmp_path / "parts"], tmp_path / "merged.lmdb", progress=Progress())
    for out in (tmp_path / "s.lmdb", a_store(tmp_path / "store", {"a": jpegs(0, 1)})):
        with pytest.raises(UsageError, match="a folder for parts"):
            ingest(slides, out, part="1/2", progress=Progress(), **TILING)
    with pytest.raises(UsageError, match="no parts to join"):
        ingest(slides, tmp_path / "none", join=True, progress=Progress(), **TILING)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot create or write to"):
        ingest(slides, tmp_path / "file" / "parts", part="1/2", progress=Progress(), **TILING)
    with pytest.raises(UsageError, match=r"the scratch folder .* cannot be written"):
        do(slides, "2/2", scratch=tmp_path / "file")
    with pytest.raises(UsageError, match="--scratch: found no folder"):
        do(slides, "2/2", scratch=tmp_path / "not" / "mounted")
    (tmp_path / "mine" / "parts").mkdir(parents=True)
    for number in ("1/2", None):
        with pytest.raises(UsageError, match="and not empty: found parts"):
            ingest(slides, tmp_path / "mine", part=number, progress=Progress(), **TILING)
    assert [path.name for path in tmp_path.glob("**/*.lmdb")] == [
        path.name for path in (tmp_path / "parts").glob("part-*.lmdb")
    ]


def test_imported_coordinates_in_parts(slides: Path, tmp_path: Path) -> None:
    for number in range(SLIDES):
        write_coords(tmp_path / "co" / f"slide-00{number}.h5", [(0, 16 * number)], **COORDS)
    values: dict[str, Any] = {"progress": Progress(), "scratch": tmp_path / "scratch"}
    for part in ("1/2", "2/2"):
        import_coords(tmp_path / "co", slides, tmp_path / "parts", part=part, **values)
    report = import_coords(tmp_path / "co", slides, tmp_path / "parts", join=True, **values)
    import_coords(tmp_path / "co", slides, tmp_path / "plain.lmdb", progress=Progress())
    check(tmp_path / "parts", read_slides(tmp_path / "plain.lmdb"))
    assert len(report.of(SlideStatus.COMPLETE)) == SLIDES


def test_slides_of_killed_processes_are_published(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process was killed when it started a store, one while it filled it, one after it had moved it."""
    do(slides, "1/2", join=False)
    options = IngestPartOptions(part="2/2", scratch=tmp_path / "scratch")
    scratch = IngestParts.open(tmp_path / "parts", options, Progress()).scratch
    (part,) = (tmp_path / "parts").glob("part-*.lmdb")
    shutil.copytree(part, scratch / part.stem / part.name)
    started = scratch / "part-begun" / "part-begun.lmdb"
    started.mkdir(parents=True)
    lmdb.open(str(started), max_dbs=8).close()
    filled = scratch / "part-filled" / "part-filled.lmdb"
    ingest(slides, filled, progress=Progress(), **TILING)
    broken = scratch / "part-broken" / "part-broken.lmdb"
    shutil.copytree(part, broken)
    (broken / "data.mdb").write_bytes(b"x" * 9000)
    left = {path.name for path in scratch.iterdir()}
    with monkeypatch.context() as patch:  # those of other users stay
        patch.setattr("os.getuid", lambda: -1)
        IngestParts.open(tmp_path / "parts", options, Progress())
    assert {path.name for path in scratch.iterdir()} == left
    report = do(slides, "2/2")
    assert [path.name for path in scratch.iterdir()] == ["part-broken"]
    assert {*(tmp_path / "parts").glob("part-*")} == {part, tmp_path / "parts" / filled.name}
    assert len(recorded(tmp_path / "parts")) == SLIDES
    assert "skipped" in statuses(report).values()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MachineShort])
def test_interrupted_part_publishes_complete_slides(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    from histopipe.ingestion import pipeline

    record, count = pipeline.Pipeline._record, [0]

    def stop_at_third(self: Any, job: Any) -> None:
        record(self, job)
        count[0] += 1
        if count[0] == 3:
            raise stop("no space")

    monkeypatch.setattr(pipeline.Pipeline, "_record", stop_at_third)
    with pytest.raises(stop):
        do(slides, "1/1", join=False)
    monkeypatch.undo()
    (part,) = (tmp_path / "parts").glob("part-*.lmdb")
    with Store(part) as store:
        states = [record.state for record in store.slides]
    assert states.count(SlideState.COMPLETE) == 3
    report = do(slides, "1/1")
    assert [*statuses(report).values()].count("skipped") == 3 and not report.failed


@pytest.mark.long(reason="a process that is ended by a signal")
def test_part_publishes_its_slides_on_sigterm(slides: Path, tmp_path: Path) -> None:
    """Slurm sends it at the time limit of a job."""
    for number in range(SLIDES, 300):
        os.link(slides / "slide-000.svs", slides / f"slide-{number:03}.svs")
    (slides / "labels.csv").unlink()
    words = ["--out", "parts", "--patch-size", "64", "--tissue", "none", "--scratch", "scratch"]
    with subprocess.Popen(
        [*COMMAND, "ingest", str(slides), *words, "--part", "slurm/1", "--workers", "1"],
        cwd=tmp_path,
        env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert any(" complete slide-" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert "publishing complete slides" in process.stderr.read()
        assert process.wait() == 130
    (part,) = (tmp_path / "parts").glob("part-*.lmdb")
    with Store(part) as store:
        assert 1 <= len(store.complete) < 300
    assert not any((tmp_path / "scratch").iterdir())


def test_full_scratch_disk_is_reported(slides: Path, tmp_path: Path, run: RunCommand) -> None:
    with small_disk(tmp_path / "scratch", "200k"):
        flags = ("--part", "1/1", "--scratch", "scratch", "--patch-size", "64", "--tissue", "none")
        done = run("ingest", slides, "--out", "parts", *flags)
        assert done.returncode == 6 and "disk" in done.stderr


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", DamagedStore),
        ("[]", UnknownVersion),
        ('{"version": 2}', UnknownVersion),
        ('{"version": 1, "uuid": "x", "slides": {"a": "../b.lmdb"}}', DamagedStore),
        ('{"version": 1, "uuid": "x", "slides": {"a": ".b.lmdb"}}', DamagedStore),
        ('{"version": 1, "uuid": "x", "slides": {"a": 7}}', DamagedStore),
        ('{"version": 1, "slides": {}}', DamagedStore),
    ],
)
def test_invalid_catalogs_are_rejected(
    tmp_path: Path, content: str, error: type[Exception]
) -> None:
    with atomic_write(tmp_path / CATALOG) as part:
        part.write_text(content)
    with pytest.raises(error):
        read_catalog(tmp_path)


def test_part_shows_only_slides_assigned_by_catalog(tmp_path: Path) -> None:
    slides = {f"slide-00{number}": jpegs(number, 2) for number in range(SLIDES)}
    local = a_store(tmp_path / "local.lmdb", slides)
    for name in ("part-a", "part-b"):
        shutil.copytree(local, tmp_path / f"{name}.lmdb")
    names = list(slides)
    parts = {name: f"part-{'ab'[n % 2]}.lmdb" for n, name in enumerate(names)}
    catalog = Catalog(tmp_path, slides=parts)
    catalog.write()
    assert parts_of(tmp_path) == [tmp_path / "part-a.lmdb", tmp_path / "part-b.lmdb"]
    with Store(tmp_path / "part-a.lmdb") as part, Store(tmp_path / "part-b.lmdb") as other:
        assert [record.id for record in part.slides] == names[::2]
        assert [record.id for record in other.slides] == names[1::2]
    with Store(tmp_path / "part-a.lmdb", hidden=True) as part:
        assert len(part.slides) == SLIDES
    del catalog.slides[names[0]]
    catalog.write()
    with Store(tmp_path / "part-a.lmdb") as part:
        assert [record.id for record in part.slides] == names[2::2]
