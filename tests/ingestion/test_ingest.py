"""The command `ingest` on real and synthetic slides, with wrong input, interrupts, damaged slides and full disks."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

from helpers.commands import COMMAND, INTERRUPTIBLE, Run, small_disk
from helpers.inline import InlineWorkers, in_process
from helpers.slides import CMU, TCGA, make_slides
from helpers.stores import outcomes, read_store
from histopipe.errors import DamagedStore, SlideUnreadable
from histopipe.geometry import Mpp
from histopipe.ingestion.ingest_report import IngestProgress, SlideStatus
from histopipe.ingestion.ingest_slides import find_early_outcome
from histopipe.ingestion.options import AskedRoute, IngestOptions
from histopipe.ingestion.patch_source import close_all, store_chunk
from histopipe.ingestion.pipeline import Pipeline
from histopipe.ingestion.planning import plan_slide
from histopipe.ingestion.slide_job import SlideJob
from histopipe.slides.slide_files import SlideFile
from histopipe.store.claims import Claims
from histopipe.store.record import FailureKind, SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress
from histopipe.tiling.spec import TilingSpec


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs commands in this process."""
    return in_process(tmp_path, monkeypatch, capsys)


@pytest.fixture
def command(tmp_path: Path) -> Run:
    """Runs commands in a new process, so that a full disk does not affect this process."""

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [*COMMAND, *map(str, arguments)]
        return subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=False)

    return call


@pytest.fixture
def mpps(tmp_path: Path) -> Path:
    path = tmp_path / "mpps.csv"
    path.write_text(f"slide,mpp\n{TCGA}.svs,0.5\n")
    return path


def test_ingest_of_real_slides(run: Run, data: Path, tmp_path: Path, mpps: Path) -> None:
    done = run("ingest", data / "slides", "--json")
    assert done.returncode == 3
    by_slide = outcomes(done.stdout)
    assert {name: slide["status"] for name, slide in by_slide.items()} == {
        CMU: "complete",
        TCGA: "failed",
        "boxes": "failed",
        "dicom/j2k/camelyon16-overview": "failed",
        "dicom/jpeg/camelyon16-overview": "failed",
        "small": "complete",
    }
    assert "no usable mpp" in by_slide[TCGA]["reason"]
    assert "--mpp-csv (columns slide,mpp)" in by_slide[TCGA]["reason"]
    assert "352.778 mpp" in by_slide["boxes"]["reason"]
    for name in ("dicom/j2k/camelyon16-overview", "dicom/jpeg/camelyon16-overview"):
        assert "found 28.9685 mpp at its finest" in by_slide[name]["reason"]
    assert by_slide["small"]["patches"] == 0
    assert by_slide["small"]["notes"] == [
        "no patch fits: level 0 has 16×16 scanned pixels, a patch needs 256×256"
    ]

    before = read_store(tmp_path / "patches.lmdb")
    again = run("ingest", data / "slides", "--mpp-csv", mpps, "--json")
    assert again.returncode == 3
    by_slide = outcomes(again.stdout)
    assert by_slide[TCGA]["status"] == "complete"
    assert by_slide[CMU]["status"] == by_slide["small"]["status"] == "skipped"
    after = read_store(tmp_path / "patches.lmdb")
    assert {name: after[name] for name in before} == before
    assert set(after) == {CMU, TCGA, "small"}


def test_invalid_files_fail(run: Run, data: Path) -> None:
    done = run("ingest", data / "bad")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    for name in ("broken.svs", "git-lfs-pointer.ndpi", "unopenable.tiff", "not-a-pyramid.tif"):
        assert name in done.stderr


def test_stored_patches_match_openslide(run: Run, data: Path, tmp_path: Path, mpps: Path) -> None:
    """Compare every patch of two real H&E slides, decoded by Pillow, with OpenSlide at its coordinates."""
    arguments = [data / "slides" / f"{name}.svs" for name in (CMU, TCGA)]
    assert run("ingest", *arguments, "--mpp-csv", mpps).returncode == 0
    differences = []
    with Store(tmp_path / "patches.lmdb") as store:
        assert len(store) > 150
        for number, record in store.complete.items():
            slide = openslide.OpenSlide(record.path)
            index = store.index(number)
            assert record.level == 0
            for row in range(record.planned):
                value = store.value(number, row)
                assert value[:2] == b"\xff\xd8"
                image = Image.open(io.BytesIO(value))
                assert image.size == (256, 256)
                assert image.mode == "RGB"
                corner = int(index["x_l0"][row]), int(index["y_l0"][row])
                truth = slide.read_region(corner, 0, (256, 256)).convert("RGB")
                difference = np.asarray(image).astype(int) - np.asarray(truth)
                differences.append(abs(difference).mean())
                assert len(value) == index["length"][row]
    # JPEG of quality 90 causes differences of 2.2 on average and 3.1 at most.
    assert np.mean(differences) < 2.5
    assert np.max(differences) < 5


def test_png_patches_equal_reduced_regions(run: Run, data: Path, tmp_path: Path) -> None:
    slide = data / "slides" / f"{CMU}.svs"
    assert (
        run(
            "ingest", slide, "--mpp", 1, "--patch-size", 64, "--codec", "png", "--overlap", 16
        ).returncode
        == 0
    )
    handle = openslide.OpenSlide(slide)
    with Store(tmp_path / "patches.lmdb") as store:
        index, record = store.index(0), store.records[0]
        assert (record.read_size, record.stride, record.resampling) == (128, 96, "area")
        for row in range(0, record.planned, 7):
            corner = int(index["x_l0"][row]), int(index["y_l0"][row])
            truth = handle.read_region(corner, 0, (128, 128)).convert("RGB").reduce(2)
            assert (store.read(CMU, row) == np.asarray(truth)).all()


def test_grid_starts_at_slide_bounds(run: Run, tmp_path: Path) -> None:
    make_slides(
        tmp_path / "in", "--format", "scn", "--size", "1500x1000", "--bounds", "640,320,3000,2500"
    )
    assert (
        run("ingest", "in", "--tissue", "none", "--mpp", 0.499, "--patch-size", 250).returncode == 0
    )
    with Store(tmp_path / "patches.lmdb") as store:
        index = store.index(0)
    assert sorted(set(index["x_l0"].tolist())) == [640 + 250 * i for i in range(6)]
    assert sorted(set(index["y_l0"].tolist())) == [320 + 250 * i for i in range(4)]


@pytest.mark.nightly(reason="three kills; test_kill_at_random_time has one in make test")
def test_resume_after_three_kills_equals_uninterrupted_ingest(
    made: Path, tmp_path: Path, run: Run
) -> None:
    whole, killed = tmp_path / "whole.lmdb", tmp_path / "killed.lmdb"
    arguments = ["--patch-size", "64", "--workers", "2"]
    assert run("ingest", made, "--out", whole, *arguments).returncode == 0
    complete: list[int] = []
    for part in (0.2, 0.5, 0.8):
        child = subprocess.Popen(
            [*COMMAND, "ingest", str(made), "--out", str(killed), *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stderr is not None
        for _ in range(int(12 * part) - sum(complete[-1:]) or 1):
            child.stderr.readline()  # one line per slide
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stderr.close()
        with Store(killed) as store:
            complete.append(len(store.complete))
    assert complete == sorted(complete)
    assert 0 < complete[-1] < 12, "the ingest was complete before the last kill"
    assert run("ingest", made, "--out", killed, *arguments).returncode == 0
    assert read_store(killed) == read_store(whole)
    with Store(killed) as store:
        assert store._environment.handle is not None
        with store._environment.read() as txn:
            stored = txn.stat(store._environment.databases[b"patches"])["entries"]
        assert stored == sum(record.planned for record in store.complete.values())


@pytest.mark.parametrize(
    "sent",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly(reason="the same as SIGINT")),
    ],
)
def test_interrupt_leaves_usable_store(tmp_path: Path, sent: signal.Signals) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "5000x5000")
    for number in (1, 2):
        shutil.copy(path, path.with_name(f"copy-{number}.svs"))
    child = subprocess.Popen(
        [
            *INTERRUPTIBLE,
            "ingest",
            "in",
            "--patch-size",
            "32",
            "--codec",
            "png",
            "--tissue",
            "none",
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    store = tmp_path / "patches.lmdb"
    while not (store / "ingest.lock").exists():
        time.sleep(0.05)
    time.sleep(1)
    children = _children(child.pid)
    os.killpg(child.pid, sent)  # a terminal sends the signal to all processes
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in stderr
    assert "Traceback" not in stderr
    assert children
    _wait_for_end(children)
    with Store(store) as opened:
        assert len(opened.slides) == 3


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def _wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.nightly(reason="test_workers_end_with_a_killed_parent shows it of the pool")
def test_workers_end_when_parent_is_killed(tmp_path: Path) -> None:
    make_slides(tmp_path / "in", "--size", "6000x6000")
    child = subprocess.Popen(
        [*COMMAND, "ingest", "in", "--patch-size", "32", "--codec", "png", "--tissue", "none"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    while not (tmp_path / "patches.lmdb" / "ingest.lock").exists():
        time.sleep(0.05)
    time.sleep(1)
    children = _children(child.pid)
    child.kill()
    child.wait()
    assert len(children) >= 2
    _wait_for_end(children)


@pytest.mark.nightly(
    reason="two new processes; test_claims_are_exclusive_and_end_with_owner shows how slides are shared"
)
def test_parallel_ingests_share_slides(made: Path, tmp_path: Path) -> None:
    store = tmp_path / "s.lmdb"
    command = [*COMMAND, "ingest", str(made), "--out", str(store), "--patch-size", "64", "--json"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    reports = [json.loads(child.communicate(timeout=300)[0]) for child in children]
    assert [report["exit_code"] for report in reports] == [0, 0]
    done = [{s["id"] for s in report["slides"] if s["status"] == "complete"} for report in reports]
    assert len(done[0] | done[1]) == 12
    assert not done[0] & done[1]
    assert len(read_store(store)) == 12


def test_damaged_slides_fail_and_others_complete(run: Run, tmp_path: Path) -> None:
    paths = make_slides(
        tmp_path / "in", "--count", "3", "--size", "3000x3000", "--levels", "1", "--format", "tiff"
    )
    content = bytearray(paths[1].read_bytes())
    middle = len(content) // 2
    content[middle - 60_000 : middle + 60_000] = bytes(120_000)
    paths[1].write_bytes(content)
    (tmp_path / "in" / "half.svs").write_bytes(paths[0].read_bytes()[:100_000])
    (tmp_path / "in" / "empty.svs").write_bytes(b"")
    done = run("ingest", "in", "--tissue", "none", "--json")
    assert done.returncode == 3
    by_slide = outcomes(done.stdout)
    assert [name for name, slide in by_slide.items() if slide["status"] == "complete"] == [
        "slide-000",
        "slide-002",
    ]
    assert "cannot be read" in by_slide["slide-001"]["reason"]
    assert set(read_store(tmp_path / "patches.lmdb")) == {"slide-000", "slide-002"}


def test_unreadable_patches_keep_their_number(run: Run, tmp_path: Path) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "3000x3000", "--levels", "1,16")
    with tifffile.TiffFile(path) as tiff, path.open("r+b") as file:
        for tile in (7, 8, 30):
            file.seek(tiff.pages.first.dataoffsets[tile])
            file.write(bytes(16))  # no longer a JPEG file
    failed = run("ingest", "in", "--tissue", "none", "--json")
    assert failed.returncode == 4
    (slide,) = json.loads(failed.stdout)["slides"]
    assert (
        "of 121 patches cannot be read (--max-unreadable allows 1.00%), first:" in slide["reason"]
    )
    done = run(
        "ingest", "in", "--tissue", "none", "--max-unreadable", "50%", "--retry-failed", "--json"
    )
    assert done.returncode == 0, done.stderr
    (slide,) = json.loads(done.stdout)["slides"]
    assert slide["unreadable"] == 3
    assert "unreadable patches, first:" in slide["notes"][0]
    with Store(tmp_path / "patches.lmdb") as store:
        index = store.index(0)
        assert len(store) == 121 - slide["unreadable"]
        lost = np.flatnonzero(index["length"] == 0)
        assert len(lost) == slide["unreadable"]
        assert all(store.value(0, row) == b"" for row in lost.tolist())


def test_slide_over_limit_is_retried_when_limit_changes(run: Run, tmp_path: Path) -> None:
    """The file is unchanged, but another `--max-unreadable` or `--slide-timeout` may accept it."""
    (path,) = make_slides(tmp_path / "in", "--size", "2560x2560", "--levels", "1")
    with tifffile.TiffFile(path) as tiff, path.open("r+b") as file:
        for tile in range(30, 50):
            file.seek(tiff.pages.first.dataoffsets[tile])
            file.write(bytes(16))
    arguments = ["in", "--tissue", "none", "--mpp", 0.499]
    assert run("ingest", *arguments).returncode == 4
    again = run("ingest", *arguments)
    assert again.returncode == 4
    assert "allows 1.00%" in again.stderr
    slow = run("ingest", *arguments, "--max-unreadable", "50%", "--slide-timeout", 0.001)
    assert slow.returncode == 4
    assert "not complete after 0 s of worker time" in slow.stderr
    log = (tmp_path / "patches.lmdb" / "ingest.log").read_text()
    same = run("ingest", *arguments, "--max-unreadable", "40%", "--slide-timeout", 0.001)
    assert same.returncode == 4
    assert "planned" not in (tmp_path / "patches.lmdb" / "ingest.log").read_text()[len(log) :]
    done = run("ingest", *arguments, "--max-unreadable", "50%")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scale", [["--level", 0], ["--mpp", 0.5]])
def test_named_pipe_is_ignored(run: Run, tmp_path: Path, scale: list[Any]) -> None:
    make_slides(tmp_path / "in", "--size", "600x600")
    os.mkfifo(tmp_path / "in" / "pipe.svs")
    done = run("ingest", "in", *scale, "--json")
    assert done.returncode == 0, done.stderr
    assert set(outcomes(done.stdout)) == {"slide-000"}


def test_replaced_slide_fails_without_force(run: Run, tmp_path: Path) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "1000x1000")
    assert run("ingest", "in").returncode == 0
    before = read_store(tmp_path / "patches.lmdb")
    make_slides(tmp_path / "in", "--size", "1000x1000", "--seed", "2")
    done = run("ingest", "in")
    assert done.returncode == 4
    assert "pass --force" in done.stderr
    assert read_store(tmp_path / "patches.lmdb") == before
    assert run("ingest", "in", "--force").returncode == 0
    after = read_store(tmp_path / "patches.lmdb")
    assert after[path.stem][3] != before[path.stem][3]


class ChangingPool:
    """Runs each task in this process when it is submitted, and changes the slide before patches are read."""

    def __init__(self, change: Callable[[], None]) -> None:
        self._change = change

    def submit_within(self, seconds: float, fn: Any, /, *args: Any) -> Future[Any]:
        if fn is store_chunk:
            self._change()
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args))
        except SlideUnreadable as error:
            future.set_exception(error)
        return future


@pytest.mark.parametrize("route", ["copy", "openslide"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.utime(path, ns=(7, 7)), "changed while it was being read"),
        (lambda path: path.unlink(missing_ok=True), "No such file"),
        (lambda path: os.truncate(path, 1000), "cannot be read|changed while"),
    ],
)
def test_slide_changed_during_ingest_fails(
    tmp_path: Path, change: Callable[[Path], None], message: str, route: AskedRoute
) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "1000x1000")
    store, spec = tmp_path / "s.lmdb", TilingSpec(mpp=Mpp(0.5))
    with StoreWriter(store, spec) as writer:
        job = SlideJob(SlideFile("a", path, (path,)))
        job.number = writer.register([job.record])["a"]
        claims = Claims(store)
        pipeline = Pipeline(
            writer=writer,
            submit_within=ChangingPool(lambda: change(path)).submit_within,
            spec=spec,
            options=IngestOptions(route=route, workers=1),
            claims=claims,
            progress=IngestProgress({"a": 1}, Progress()),
        )
        pipeline.run([job])
        (outcome,) = pipeline.progress.outcomes.values()
        claims.close()
        assert outcome.status is SlideStatus.FAILED
        assert re.search(message, outcome.reason)
        assert writer.record(0).state is SlideState.FAILED
        with Store(store) as opened, pytest.raises(DamagedStore):
            opened.value(0, 0)  # all patches of the slide are removed
    close_all()


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_next_slides_are_planned_while_others_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("histopipe.ingestion.patch_source._MOST_PATCHES", 1)
    (path,) = make_slides(tmp_path / "in", "--size", "1500x1500")
    store, spec, names = (
        tmp_path / "s.lmdb",
        TilingSpec(mpp=Mpp(0.5)),
        [f"s{n:02}" for n in range(12)],
    )
    submitted: list[tuple[str, bool]] = []  # the slide, and whether the task is its plan
    inline = InlineWorkers()

    def submit(seconds: float, fn: Any, /, *args: Any) -> Future[Any]:
        plans = fn is plan_slide
        submitted.append((args[0].id if plans else names[args[1]], plans))
        return inline.submit(fn, *args)

    with StoreWriter(store, spec) as writer, closing(Claims(store)) as claims:
        jobs = [SlideJob(SlideFile(name, path, (path,))) for name in names]
        numbers = writer.register([job.record for job in jobs])
        for job in jobs:
            job.number = numbers[job.id]
        pipeline = Pipeline(
            writer=writer,
            submit_within=submit,
            spec=spec,
            options=IngestOptions(workers=workers),
            claims=claims,
            progress=IngestProgress(dict.fromkeys(names, 1), Progress()),
        )
        pipeline.run(jobs)
        outcomes = list(pipeline.progress.outcomes.values())
    close_all()
    assert [outcome.status for outcome in outcomes] == [SlideStatus.COMPLETE] * len(names)
    planned = [at for at, (_, plans) in enumerate(submitted) if plans]
    assert [submitted[at][0] for at in planned] == names
    last_chunk = {name: at for at, (name, plans) in enumerate(submitted) if not plans}
    for number, at in enumerate(planned):
        ready = sum(
            last_chunk[name] > at for name in names[:number]
        )  # planned, with chunks to copy
        assert ready <= max(2, workers)  # patches of few slides are in flight when a run is killed
        if number >= max(2, workers) and workers > 1:
            assert ready > 0  # workers copy while others plan


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 30 MB."""
    with small_disk(tmp_path / "disk", "30m") as folder:
        yield folder


def test_slide_too_large_for_disk_is_not_started(command: Run, tmp_path: Path, disk: Path) -> None:
    make_slides(tmp_path / "in", "--size", "1000x1000", "--name", "a")
    make_slides(tmp_path / "in", "--size", "6000x6000", "--name", "b")
    (disk / "other").write_bytes(bytes(24_000_000))
    done = command("ingest", "in", "--out", disk / "s.lmdb")
    assert done.returncode == 6, done.stderr
    assert "in/b000.svs needs about" in done.stderr
    assert "run the same command again" in done.stderr
    with Store(disk / "s.lmdb") as store:
        assert [record.state for record in store.slides] == ["complete", "pending"]
    (disk / "other").unlink()
    assert command("ingest", "in", "--out", disk / "s.lmdb").returncode == 0


@pytest.mark.parametrize(
    "route", ["copy", pytest.param("openslide", marks=pytest.mark.nightly(reason="another route"))]
)
def test_full_disk_keeps_complete_slides(
    command: Run, tmp_path: Path, disk: Path, route: str
) -> None:
    make_slides(tmp_path / "in", "--size", "1000x1000", "--name", "a")
    make_slides(tmp_path / "in", "--size", "6000x6000", "--name", "b")
    out = disk / "s.lmdb"
    assert command("ingest", "in/a000.svs", "--out", out, "--route", route).returncode == 0
    before = read_store(out)
    # Make the check of free space pass, although the disk is almost full.
    code = (
        "from histopipe.ingestion import pipeline as p\n"
        "p.free_bytes = lambda path: 1 << 40\n"
        "if __name__ == '__main__':\n"
        "    from histopipe.cli import main\n"
        "    main()\n"
    )
    (tmp_path / "main.py").write_text(code)
    (disk / "other").write_bytes(bytes(27_000_000))
    done = subprocess.run(
        [
            sys.executable,
            "main.py",
            "ingest",
            "in",
            "--out",
            str(out),
            "--route",
            route,
            "--workers",
            "1",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6, done.stderr
    assert f"{out} is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert read_store(out) == before
    (disk / "other").unlink()
    assert command("ingest", "in", "--out", out, "--route", route).returncode == 0
    assert set(read_store(out)) == {"a000", "b000"}


def test_copies_are_stored_with_warning(run: Run, tmp_path: Path) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "1000x1000")
    shutil.copy(path, tmp_path / "in" / "copy.svs")
    done = run("ingest", "in")
    assert done.returncode == 0
    assert "copy, slide-000 are copies of one slide" in done.stderr


def test_slide_is_recognised_from_subfolder(run: Run, tmp_path: Path) -> None:
    make_slides(tmp_path / "in" / "sub", "--size", "1000x1000")
    assert run("ingest", "in").returncode == 0
    done = run("ingest", "in/sub", "--json")
    assert done.returncode == 0
    assert outcomes(done.stdout)["sub/slide-000"]["status"] == "skipped"


def test_labels_change_without_new_ingest(run: Run, tmp_path: Path) -> None:
    make_slides(
        tmp_path / "in", "--size", "1000x1000", "--count", "2", "--classes", "normal,tumour"
    )
    assert run("ingest", "in").returncode == 0
    (tmp_path / "other.csv").write_text("slide,label,patient\nslide-000,cat,p\nslide-001,,\n")
    assert run("ingest", "in", "--labels", "other.csv").returncode == 0
    with Store(tmp_path / "patches.lmdb") as store:
        assert [(r.label, r.patient) for r in store.slides] == [("cat", "p"), (None, "slide-001")]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none"], 2, "none cannot be read: found No such file"),
        (["empty"], 4, "no slide in empty"),
        (["in", "--mpp", "0.5", "--level", "0"], 2, "expected one of --mpp, --mag and --level"),
        (["in", "--patch-size", "4"], 2, "--patch-size: found 4"),
        (["in", "--labels", "none.csv"], 2, "none.csv does not exist"),
        (["in", "--labels", "bad.csv"], 2, "bad.csv: wrong header"),
        (["in", "--labels", "extra.csv"], 2, "no slide matches 'nobody'"),
        (["in", "--mpp-csv", "extra.csv"], 2, "expected slide,mpp"),
        (["in", "--out", "in"], 2, "in is not a store, and not empty"),
        (["in", "--max-unreadable", "7"], 2, "is not a share"),
        (["in", "--default-mpp", "0"], 2, "--default-mpp: found 0.0"),
        (["in", "--slide-timeout", "inf"], 2, "--slide-timeout: found inf, expected more than 0"),
        (["in", "--slide-timeout", "nan"], 2, "--slide-timeout: found nan"),
        (["in", "--route", "teleport"], 2, "is not one of"),
        (["in", "--no-such-flag"], 2, "No such option"),
        ([], 2, "no slides"),
    ],
)
def test_wrong_input_prints_error_and_writes_nothing(
    run: Run, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    make_slides(tmp_path / "in", "--size", "600x600")
    (tmp_path / "bad.csv").write_text("name,class\n")
    (tmp_path / "extra.csv").write_text("slide,label\nslide-000,x\nnobody,y\n")
    done = run("ingest", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert not (tmp_path / "patches.lmdb").exists()


def test_rerun_without_labels_keeps_labels(run: Run, tmp_path: Path) -> None:
    make_slides(
        tmp_path / "in", "--size", "1000x1000", "--count", "2", "--classes", "normal,tumour"
    )
    (tmp_path / "in" / "labels.csv").rename(tmp_path / "l.csv")
    assert run("ingest", "in", "--labels", "l.csv").returncode == 0
    assert run("ingest", "in").returncode == 0
    assert run("ingest", "in/slide-000.svs").returncode == 0
    with Store(tmp_path / "patches.lmdb") as store:
        assert [record.label for record in store.slides] == ["normal", "tumour"]


def test_labels_csv_in_slide_folders_is_used(run: Run, tmp_path: Path) -> None:
    for name in ("p", "q"):  # the same file names in both folders, each with a labels.csv
        make_slides(
            tmp_path / name, "--size", "600x600", "--count", "2", "--classes", "normal,tumour"
        )
    assert run("ingest", *sorted((tmp_path / "p").glob("*.svs")), "--out", "a.lmdb").returncode == 0
    done = run("ingest", "p", "q", "--out", "b.lmdb")
    assert done.returncode == 0, done.stderr
    for path, count in (("a.lmdb", 2), ("b.lmdb", 4)):
        with Store(tmp_path / path) as store:
            assert [record.label for record in store.slides] == ["normal", "tumour"] * (count // 2)


def test_slide_keeps_id_with_other_arguments(run: Run, tmp_path: Path) -> None:
    make_slides(tmp_path / "p", "--size", "600x600", "--name", "one")
    make_slides(tmp_path / "q", "--size", "600x600", "--name", "two", "--seed", "2")
    assert run("ingest", "p").returncode == 0
    (tmp_path / "l.csv").write_text("slide,label\none000,x\ntwo000,y\n")
    assert run("ingest", "p", "q", "--labels", "l.csv").returncode == 0
    with Store(tmp_path / "patches.lmdb") as store:
        assert [(r.id, r.label) for r in store.slides] == [("one000", "x"), ("q/two000", "y")]


def test_other_slide_with_same_id_fails(run: Run, tmp_path: Path) -> None:
    make_slides(tmp_path / "p", "--size", "600x600")
    make_slides(tmp_path / "q", "--size", "600x600", "--seed", "2")
    assert run("ingest", "p").returncode == 0
    before = read_store(tmp_path / "patches.lmdb")
    done = run("ingest", "q", "--force")
    assert done.returncode == 4
    assert "another slide, p/slide-000.svs, has the id 'slide-000' in the store" in done.stderr
    assert read_store(tmp_path / "patches.lmdb") == before
    (tmp_path / "p" / "slide-000.svs").replace(tmp_path / "q" / "slide-000.svs")
    assert run("ingest", "q").returncode == 0  # the first slide was moved


CRASHING = """
import os
from histopipe.ingestion import patch_source, pipeline, planning

def plan_slide(slide, *arguments):
    if "evil" in slide.id:
        os.abort()
    return planning.plan_slide(slide, *arguments)

def store_chunk(store, number, recipe, *chunk):
    result = patch_source.store_chunk(store, number, recipe, *chunk)
    if "late" in recipe.path.name:
        os.abort()
    return result
"""


def test_slide_that_kills_worker_fails_alone(tmp_path: Path) -> None:
    """Simulate the crash of a decoder by a real abort in a worker process."""
    make_slides(tmp_path / "in", "--size", "1500x1500", "--count", "4")
    for name in ("evil.svs", "late.svs"):
        shutil.copy(tmp_path / "in" / "slide-000.svs", tmp_path / "in" / name)
    (tmp_path / "crashing.py").write_text(CRASHING)
    code = (
        "import crashing\n"
        "from histopipe.ingestion import pipeline as p\n"
        "p.plan_slide = crashing.plan_slide\n"
        "p.store_chunk = crashing.store_chunk\n"
        "if __name__ == '__main__':\n"
        "    from histopipe.cli import main\n"
        "    main()\n"
    )
    (tmp_path / "main.py").write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "main.py",
            "ingest",
            "in",
            "--workers",
            "2",
            "--json",
            "--patch-size",
            "32",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 3, done.stderr
    by_slide = outcomes(done.stdout)
    for name in ("evil", "late"):
        assert "worker processes died while reading it" in by_slide.pop(name)["reason"]
    assert [slide["status"] for slide in by_slide.values()] == ["complete"] * 4


def test_damaged_tile_in_thumbnail_level_loses_one_patch(run: Run, tmp_path: Path) -> None:
    """The slide has one level, so that the thumbnail is read from the damaged tiles."""
    (path,) = make_slides(tmp_path / "in", "--size", "2560x2560", "--levels", "1")
    with tifffile.TiffFile(path) as tiff, path.open("r+b") as file:
        file.seek(tiff.pages.first.dataoffsets[44])  # row 4, column 4: in the tissue
        file.write(bytes(16))
    done = run("ingest", "in", "--max-unreadable", "10%", "--json", "--mpp", 0.499)
    assert done.returncode == 0, done.stderr
    (slide,) = json.loads(done.stdout)["slides"]
    assert slide["unreadable"] == 1
    with Store(tmp_path / "patches.lmdb") as store:
        index = store.index(0)
    lost = index["length"] == 0
    assert (index["x_l0"][lost].tolist(), index["y_l0"][lost].tolist()) == ([1024], [1024])


def test_full_disk_at_start_leaves_no_files(command: Run, tmp_path: Path) -> None:
    make_slides(tmp_path / "in", "--size", "600x600")
    with small_disk(tmp_path / "disk", "1m") as disk:
        (disk / "fill").write_bytes(bytes((1 << 20) - 8192))
        done = command("ingest", "in", "--out", disk / "s.lmdb")
        assert done.returncode == 6, done.stderr
        assert "is full" in done.stderr
        assert [path.name for path in disk.iterdir()] == ["fill"]


def test_unreadable_folder_is_reported(run: Run, tmp_path: Path) -> None:
    make_slides(tmp_path / "in" / "locked", "--size", "600x600")
    (tmp_path / "in" / "locked").chmod(0)
    drop = "-dac_override,-dac_read_search"
    command = ["setpriv", "--bounding-set", drop, "--inh-caps", drop] if os.geteuid() == 0 else []
    for argument in ("in", "in/locked/slide-000.svs"):
        done = subprocess.run(
            [*command, *COMMAND, "ingest", argument],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "locked" in done.stderr
        assert "Permission denied" in done.stderr
        assert "Traceback" not in done.stderr
    (tmp_path / "in" / "locked").chmod(0o700)


def test_level_refuses_mixed_scales(run: Run, tmp_path: Path) -> None:
    make_slides(tmp_path / "in", "--size", "600x600", "--name", "a")
    make_slides(tmp_path / "in", "--size", "600x600", "--name", "b", "--mpp", "0.25")
    done = run("ingest", "in", "--level", 0)
    assert done.returncode == 2
    assert "--level 0 would mix scales: found 0.25 mpp (b000) and 0.499 mpp (a000)" in done.stderr
    assert not (tmp_path / "patches.lmdb").exists()
    assert run("ingest", "in", "--level", 0, "--allow-mixed-mpp").returncode == 0


def test_ingest_runs_without_tensorflow(tmp_path: Path) -> None:
    make_slides(tmp_path / "in", "--size", "600x600")
    for name in ("tensorflow", "keras", "sklearn"):
        (tmp_path / "blocked" / name).mkdir(parents=True)
        (tmp_path / "blocked" / name / "__init__.py").write_text("raise ImportError('not here')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "blocked")}
    environment.pop("HISTOPIPE_FORK_SERVER", None)  # the fork server has loaded TensorFlow
    done = subprocess.run(
        [*COMMAND, "ingest", "in"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trained = subprocess.run(
        [*COMMAND, "train"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert trained.returncode == 6
    assert "pip install 'histopipe[train]'" in trained.stderr


def test_info(run: Run, made_store: Path) -> None:
    text = run("info", made_store)
    assert text.returncode == 0
    assert "12 complete" in text.stdout
    value = json.loads(run("info", made_store, "--json").stdout)
    assert value["states"] == {"complete": 12}
    assert value["labels"] == {"normal": 6, "tumour": 6}
    assert value["patches"] == sum(slide["stored"] for slide in value["slides"]) > 500
    assert value["spec"]["patch_size"] == 128
    assert run("info", "none").returncode == 4


def test_claims_are_exclusive_and_end_with_owner(tmp_path: Path) -> None:
    ours, theirs = Claims(tmp_path), Claims(tmp_path)
    assert ours.take(3)
    assert not theirs.take(3)
    assert theirs.take(4)
    ours.close()
    assert theirs.take(3)
    theirs.close()


def record(state: SlideState, **fields: Any) -> SlideRecord:
    file = {"size_bytes": 100, "mtime_ns": 5}
    return SlideRecord(
        id="a", path="a.svs", resolved_path="/a.svs", state=state, **{**file, **fields}
    )


@pytest.mark.parametrize(
    ("record", "options", "status"),
    [
        (record(SlideState.PENDING), {}, None),
        (record(SlideState.COMPLETE), {}, SlideStatus.SKIPPED),
        (record(SlideState.COMPLETE), {"force": True}, SlideStatus.SKIPPED),
        (record(SlideState.COMPLETE, size_bytes=99), {}, SlideStatus.FAILED),
        (record(SlideState.COMPLETE, mtime_ns=4), {}, SlideStatus.FAILED),
        (record(SlideState.COMPLETE, mtime_ns=4), {"force": True}, None),
        (
            record(SlideState.COMPLETE, mpp=0.5, mpp_source="mpp-csv"),
            {"mpp": Mpp(0.5)},
            SlideStatus.SKIPPED,
        ),
        (
            record(SlideState.COMPLETE, mpp=0.5, mpp_source="mpp-csv"),
            {"mpp": Mpp(0.25)},
            SlideStatus.SKIPPED,
        ),
        *(
            (
                record(SlideState.COMPLETE, mpp=mpp, mpp_source=source),
                {name: Mpp(0.25), "force": force},
                None if force else SlideStatus.SKIPPED,
            )
            for mpp, source, name in (
                (0.5, "properties", "mpp"),
                (0.5, "default-mpp", "mpp"),
                (0.5, "default-mpp", "default_mpp"),
                (None, None, "mpp"),
                (None, None, "default_mpp"),
            )
            for force in (False, True)
        ),
        (
            record(SlideState.COMPLETE, mpp=0.5, mpp_source="properties"),
            {"default_mpp": Mpp(0.25), "force": True},
            SlideStatus.SKIPPED,
        ),
        (
            record(SlideState.COMPLETE, mpp=0.5, mpp_source="mpp-csv"),
            {"default_mpp": Mpp(0.25)},
            SlideStatus.SKIPPED,
        ),
        (record(SlideState.FAILED, error_kind=FailureKind.OPTION), {}, None),
        (record(SlideState.FAILED, error_kind=FailureKind.FILE), {}, SlideStatus.FAILED),
        (
            record(SlideState.FAILED, error_kind=FailureKind.FILE),
            {"retry_failed": True},
            None,
        ),
        (record(SlideState.FAILED, error_kind=FailureKind.FILE, mtime_ns=4), {}, None),
    ],
)
def test_early_outcome(
    tmp_path: Path, record: SlideRecord, options: dict[str, Any], status: SlideStatus | None
) -> None:
    path = tmp_path / "a.svs"
    path.write_bytes(bytes(100))
    os.utime(path, ns=(5, 5))
    mpp = options.get("mpp")
    job = SlideJob(SlideFile("a", path, (path,)), mpp=mpp)
    job.record = record
    chosen = {name: value for name, value in options.items() if name != "mpp"}
    outcome = find_early_outcome(job, IngestOptions(**chosen))
    assert (outcome and outcome.status) is status
    if outcome is not None and Mpp(0.25) in options.values() and mpp != record.mpp:
        notes = "".join(outcome.notes)
        before = "an unknown scale" if record.mpp is None else f"{record.mpp:g} mpp"
        changed = not (mpp is None and record.mpp_source in ("mpp-csv", "properties"))
        assert (f"ingested with {before}" in notes and "0.25 mpp is not used" in notes) is changed
