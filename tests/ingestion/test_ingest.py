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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

from helpers.commands import (
    COMMAND,
    INTERRUPTIBLE,
    RunCommand,
    messages,
    pool_workers,
    run_python,
    small_disk,
)
from helpers.inline import InlineWorkers
from helpers.slides import CMU, TCGA, make_slides
from helpers.stores import outcomes, read_store
from histopipe.errors import DamagedStore
from histopipe.geometry import Mpp
from histopipe.ingestion.ingest_report import IngestProgress, SlideOutcome, SlideStatus
from histopipe.ingestion.ingest_slides import find_early_outcome
from histopipe.ingestion.options import AskedRoute, IngestOptions
from histopipe.ingestion.patch_source import close_all, store_chunk
from histopipe.ingestion.pipeline import Pipeline
from histopipe.ingestion.planning import plan_slide
from histopipe.ingestion.slide_job import SlideJob
from histopipe.runs.fork_server import ADDRESS
from histopipe.slides.slide_files import SlideFile
from histopipe.store.claims import Claims
from histopipe.store.record import FailureKind, SlideRecord, SlideState
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress
from histopipe.system.worker_pool import WorkerDied
from histopipe.tiling.spec import TilingSpec

SPEC = TilingSpec(mpp=Mpp(0.5))
pytestmark = pytest.mark.usefixtures("inline_workers")


@pytest.mark.long(reason="the real slides")
def test_ingest_of_real_slides(run: RunCommand, data: Path, tmp_path: Path) -> None:
    """A third of the patches of two H&E slides, decoded by Pillow, is compared with OpenSlide at its coordinates."""
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
    assert "352.778 mpp" in by_slide["boxes"]["reason"]
    assert "found 28.9685 mpp" in by_slide["dicom/jpeg/camelyon16-overview"]["reason"]
    assert by_slide["small"]["patches"] == 0

    before = read_store(tmp_path / "patches.lmdb")
    (tmp_path / "mpps.csv").write_text(f"slide,mpp\n{TCGA}.svs,0.5\n")
    by_slide = outcomes(run("ingest", data / "slides", "--mpp-csv", "mpps.csv", "--json").stdout)
    assert by_slide[TCGA]["status"] == "complete"
    assert by_slide[CMU]["status"] == by_slide["small"]["status"] == "skipped"
    after = read_store(tmp_path / "patches.lmdb")
    assert {name: after[name] for name in before} == before
    assert set(after) == {CMU, TCGA, "small"}

    differences = []
    with Store(tmp_path / "patches.lmdb") as store:
        assert len(store) > 150
        for number, record in store.complete.items():
            slide, index = openslide.OpenSlide(record.path), store.index(number)
            for row in range(0, record.planned, 3):
                image = Image.open(io.BytesIO(store.value(number, row)))
                assert (image.format, image.size, image.mode) == ("JPEG", (256, 256), "RGB")
                corner = int(index["x_l0"][row]), int(index["y_l0"][row])
                truth = slide.read_region(corner, 0, (256, 256)).convert("RGB")
                differences.append(abs(np.asarray(image).astype(int) - np.asarray(truth)).mean())
    # JPEG of quality 90 causes differences of 2.2 on average and 3.1 at most.
    assert np.mean(differences) < 2.5
    assert np.max(differences) < 5


@pytest.mark.parametrize(
    "sent",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.nightly(reason="the same as SIGINT")),
    ],
)
def test_interrupt_leaves_usable_store(tmp_path: Path, sent: signal.Signals) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "3000x3000")
    shutil.copy(path, path.with_name("copy.svs"))
    flags = ("--patch-size", "16", "--codec", "png", "--tissue", "none", "--workers", "1")
    child = subprocess.Popen(
        [*INTERRUPTIBLE, "ingest", "in", *flags],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (children := pool_workers(child.pid)):
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, sent)  # a terminal sends the signal to all processes
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in stderr and "Traceback" not in stderr
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/exe").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with Store(tmp_path / "patches.lmdb") as store:
        assert len(store.slides) == 2


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


def damaged(folder: Path, name: str, tiles: Iterable[int]) -> None:
    """Write a slide of 100 patches without tissue masks, some of whose tiles are no longer JPEG files."""
    (path,) = make_slides(folder, "--size", "2560x2560", "--levels", "1", "--name", name)
    with tifffile.TiffFile(path) as tiff, path.open("r+b") as file:
        for tile in tiles:
            file.seek(tiff.pages.first.dataoffsets[tile])
            file.write(bytes(16))


def test_damaged_slides_fail_and_others_complete(
    run: RunCommand, data: Path, tmp_path: Path
) -> None:
    """Another `--max-unreadable` or `--slide-timeout` may accept a damaged slide, although its file is unchanged."""
    damaged(tmp_path / "in", "d", range(30, 50))
    path = make_slides(tmp_path / "in", "--size", "1000x1000")[-1]
    (tmp_path / "in" / "half.svs").write_bytes(path.read_bytes()[:100_000])
    (tmp_path / "in" / "empty.svs").write_bytes(b"")
    real = (data / "slides" / f"{CMU}.svs").read_bytes()  # with its directories in the middle
    (tmp_path / "in" / "real.svs").write_bytes(real[: len(real) // 2])
    arguments = ("ingest", "in", "--tissue", "none", "--mpp", 0.499, "--json")

    def reason(done: subprocess.CompletedProcess[str]) -> str:
        by_slide = outcomes(done.stdout)
        failed = {name for name, slide in by_slide.items() if slide["status"] == "failed"}
        assert (failed, done.returncode) == ({"d000", "half", "empty", "real"}, 3)
        return str(by_slide["d000"]["reason"])

    for _ in range(2):
        limit = "of 100 patches cannot be read (--max-unreadable allows 1.00%), first:"
        assert limit in reason(run(*arguments))
        assert set(read_store(tmp_path / "patches.lmdb")) == {"slide-000"}
    slow = run(*arguments, "--max-unreadable", "50%", "--slide-timeout", 0.001)
    assert "not complete after 0 s of worker time" in reason(slow)
    log = (tmp_path / "patches.lmdb" / "ingest.log").read_text()
    reason(run(*arguments, "--max-unreadable", "40%", "--slide-timeout", 0.001))
    assert "planned" not in (tmp_path / "patches.lmdb" / "ingest.log").read_text()[len(log) :]
    slide = outcomes(run(*arguments, "--max-unreadable", "50%").stdout)["d000"]
    assert (slide["status"], slide["unreadable"]) == ("complete", 20)
    assert "unreadable patches, first:" in slide["notes"][0]
    with Store(tmp_path / "patches.lmdb") as store:  # the patches keep their numbers
        lengths = store.index(store.number("d000"))["length"]
    assert np.flatnonzero(lengths == 0).tolist() == list(range(30, 50))


def test_replaced_slide_fails_without_force(run: RunCommand, tmp_path: Path) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "1000x1000")
    assert run("ingest", "in").returncode == 0
    before = read_store(tmp_path / "patches.lmdb")
    make_slides(tmp_path / "in", "--size", "1000x1000", "--seed", "2")
    assert "pass --force" in messages(run("ingest", "in"), 4)
    assert read_store(tmp_path / "patches.lmdb") == before
    assert run("ingest", "in", "--force").returncode == 0
    assert read_store(tmp_path / "patches.lmdb")[path.stem][3] != before[path.stem][3]


def ingested(
    store: Path, path: Path, names: Sequence[str], submit: Any, **options: Any
) -> list[SlideOutcome]:
    """Ingest a file under several names, with another function that submits tasks."""
    with StoreWriter(store, SPEC) as writer, closing(Claims(store)) as claims:
        jobs = [SlideJob(SlideFile(name, path, (path,))) for name in names]
        numbers = writer.register([job.record for job in jobs])
        for job in jobs:
            job.number = numbers[job.id]
        progress = IngestProgress(dict.fromkeys(names, 1), Progress())
        Pipeline(writer, submit, SPEC, IngestOptions(**options), claims, progress).run(jobs)
    close_all()
    return list(progress.outcomes.values())


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

    def submit(seconds: float, fn: Any, /, *args: Any) -> Future[Any]:
        if fn is store_chunk:
            change(path)
        return InlineWorkers().submit(fn, *args)

    (outcome,) = ingested(tmp_path / "s.lmdb", path, ["a"], submit, route=route, workers=1)
    assert outcome.status is SlideStatus.FAILED
    assert re.search(message, outcome.reason)
    with Store(tmp_path / "s.lmdb") as store:
        assert store.records[0].state is SlideState.FAILED
        with pytest.raises(DamagedStore):
            store.value(0, 0)  # all patches of the slide are removed


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_next_slides_are_planned_while_others_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("histopipe.ingestion.patch_source._MOST_PATCHES", 1)
    (path,) = make_slides(tmp_path / "in", "--size", "1000x1000")
    names = [f"s{n:02}" for n in range(12)]
    submitted: list[tuple[str, bool]] = []  # the slide, and whether the task is its plan

    def submit(seconds: float, fn: Any, /, *args: Any) -> Future[Any]:
        plans = fn is plan_slide
        submitted.append((args[0].id if plans else names[args[1]], plans))
        return InlineWorkers().submit(fn, *args)

    outcomes = ingested(tmp_path / "s.lmdb", path, names, submit, workers=workers)
    assert [outcome.status for outcome in outcomes] == [SlideStatus.COMPLETE] * len(names)
    planned = {name: at for at, (name, plans) in enumerate(submitted) if plans}
    assert list(planned) == names
    last_chunk = {name: at for at, (name, plans) in enumerate(submitted) if not plans}
    for number, at in enumerate(planned.values()):
        # Slides that are planned, with chunks to copy.
        ready = sum(last_chunk[name] > at for name in names[:number])
        assert ready <= max(2, workers)  # patches of few slides are in flight when a run is killed
        if number >= max(2, workers) and workers > 1:
            assert ready > 0  # workers copy while others plan


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MB, and slides of 16 and 121 patches in the folder `in`."""
    make_slides(tmp_path / "in", "--size", "1000x1000", "--name", "a")
    make_slides(tmp_path / "in", "--size", "3000x3000", "--name", "b")
    with small_disk(tmp_path / "disk", "8m") as folder:
        yield folder


def test_slide_too_large_for_disk_is_not_started(run: RunCommand, disk: Path) -> None:
    (disk / "other").write_bytes(bytes(5_400_000))
    command = ("ingest", "in", "--out", disk / "s.lmdb", "--tissue", "none")
    assert "in/b000.svs needs about" in messages(run(*command), 6)
    with Store(disk / "s.lmdb") as store:
        assert [record.state for record in store.slides] == ["complete", "pending"]
    (disk / "other").unlink()
    assert run(*command).returncode == 0


@pytest.mark.parametrize(
    "route", ["copy", pytest.param("openslide", marks=pytest.mark.nightly(reason="another route"))]
)
def test_full_disk_keeps_complete_slides(
    run: RunCommand, tmp_path: Path, disk: Path, route: str
) -> None:
    """The disk fills in a new process: a write to a mapped file could kill it."""
    out = disk / "s.lmdb"
    flags = ("--out", out, "--tissue", "none", "--route", route, "--workers", "1")
    assert run("ingest", "in/a000.svs", *flags).returncode == 0
    before = read_store(out)
    # Make the check of free space pass, although the disk is almost full.
    code = (
        "from histopipe.ingestion import pipeline\n"
        "from histopipe.cli import main\n"
        "pipeline.free_bytes = lambda path: 1 << 40\n"
        "main()\n"
    )
    (disk / "other").write_bytes(bytes(7_300_000))
    done = subprocess.run(
        [sys.executable, "-c", code, "ingest", "in", *map(str, flags)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6, done.stderr
    assert f"{out} is full" in done.stderr and "Traceback" not in done.stderr
    assert read_store(out) == before
    (disk / "other").unlink()
    assert run("ingest", "in", *flags).returncode == 0
    assert set(read_store(out)) == {"a000", "b000"}


def test_labels_change_without_new_ingest(run: RunCommand, tmp_path: Path) -> None:
    """An ingest without labels keeps those of the store."""
    make_slides(
        tmp_path / "in", "--size", "1000x1000", "--count", "2", "--classes", "normal,tumour"
    )
    (tmp_path / "in" / "labels.csv").rename(tmp_path / "l.csv")
    (tmp_path / "other.csv").write_text("slide,label,patient\nslide-000,cat,p\nslide-001,,\n")
    for words, labels in (
        (("in", "--labels", "l.csv"), ["normal", "tumour"]),
        (("in/slide-000.svs",), ["normal", "tumour"]),
        (("in", "--labels", "other.csv"), ["cat", None]),
    ):
        assert run("ingest", *words).returncode == 0
        with Store(tmp_path / "patches.lmdb") as store:
            assert [record.label for record in store.slides] == labels
    assert [record.patient for record in store.slides] == ["p", "slide-001"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none"], 2, "none cannot be read: found No such file"),
        (["empty"], 4, "no slide in empty"),
        (["in", "--out", "in"], 2, "in is not a store, and not empty"),
        (["in", "--max-unreadable", "7"], 2, "is not a share"),
        (["in", "--route", "teleport"], 2, "is not one of"),
        (["in", "--no-such-flag"], 2, "No such option"),
        ([], 2, "no slides"),
    ],
)
def test_wrong_input_prints_error_and_writes_nothing(
    run: RunCommand, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.svs").touch()
    done = run("ingest", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert not done.stdout
    assert not (tmp_path / "patches.lmdb").exists()


def test_labels_csv_in_slide_folders_is_used(run: RunCommand, tmp_path: Path) -> None:
    for name in ("p", "q"):  # the same file names in both folders, each with a labels.csv
        make_slides(
            tmp_path / name, "--size", "600x600", "--count", "2", "--classes", "normal,tumour"
        )
    files = sorted((tmp_path / "p").glob("*.svs"))
    for slides, times in ((files, 1), (["p", "q"], 2)):
        out = tmp_path / f"{times}.lmdb"
        assert run("ingest", *slides, "--out", out).returncode == 0
        with Store(out) as store:
            assert [record.label for record in store.slides] == ["normal", "tumour"] * times


def test_other_slide_with_same_id_fails(run: RunCommand, tmp_path: Path) -> None:
    """A slide of the store keeps its id with other arguments."""
    make_slides(tmp_path / "p", "--size", "600x600")
    make_slides(tmp_path / "q", "--size", "600x600", "--seed", "2")
    assert run("ingest", "p").returncode == 0
    before = read_store(tmp_path / "patches.lmdb")
    assert "another slide, p/slide-000.svs, has the id 'slide-000' in the store" in messages(
        run("ingest", "q", "--force"), 4
    )
    assert read_store(tmp_path / "patches.lmdb") == before
    make_slides(tmp_path / "r", "--size", "600x600", "--name", "two")
    (tmp_path / "l.csv").write_text("slide,label\nslide-000,x\ntwo000,y\n")
    assert run("ingest", "p", "r", "--labels", "l.csv").returncode == 0
    with Store(tmp_path / "patches.lmdb") as store:
        assert [(r.id, r.label) for r in store.slides] == [("slide-000", "x"), ("r/two000", "y")]
    (tmp_path / "p" / "slide-000.svs").replace(tmp_path / "q" / "slide-000.svs")
    assert run("ingest", "q").returncode == 0  # the first slide was moved


def test_slide_that_kills_worker_fails_alone(tmp_path: Path) -> None:
    """One dead worker may have another cause, so that the task is submitted again. test_pool.py has real crashes."""
    (path,) = make_slides(tmp_path / "in", "--size", "1000x1000")
    names, deaths = ["evil", "fine", "late", "once"], Counter[str]()

    def submit(seconds: float, fn: Any, /, *args: Any) -> Future[Any]:
        name = args[0].id if fn is plan_slide else names[args[1]]
        dies = {"evil": fn is plan_slide, "late": fn is store_chunk, "once": not deaths["once"]}
        if dies.get(name):
            deaths[name] += 1
            future = Future[Any]()
            future.set_exception(WorkerDied("killed by SIGABRT"))
            return future
        return InlineWorkers().submit(fn, *args)

    outcomes = {o.id: o for o in ingested(tmp_path / "s.lmdb", path, names, submit, workers=2)}
    reason = "worker processes died while reading it (killed by SIGABRT)"
    for name in ("evil", "late"):
        assert reason in outcomes.pop(name).reason
    assert {o.status for o in outcomes.values()} == {SlideStatus.COMPLETE}
    assert deaths == {"evil": 2, "late": 2, "once": 1}


def test_damaged_tile_in_thumbnail_level_loses_one_patch(run: RunCommand, tmp_path: Path) -> None:
    """The slide has one level, so that the thumbnail is read from the damaged tiles."""
    damaged(tmp_path / "in", "d", [44])  # row 4, column 4: in the tissue
    done = run("ingest", "in", "--max-unreadable", "10%", "--json", "--mpp", 0.499)
    assert outcomes(done.stdout)["d000"]["unreadable"] == 1, done.stderr
    with Store(tmp_path / "patches.lmdb") as store:
        index = store.index(0)
    lost = index["length"] == 0
    assert (index["x_l0"][lost].tolist(), index["y_l0"][lost].tolist()) == ([1024], [1024])


def test_full_disk_at_start_leaves_no_files(run: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.svs").touch()
    with small_disk(tmp_path / "disk", "1m") as disk:
        (disk / "fill").write_bytes(bytes((1 << 20) - 8192))
        command = ("ingest", "in", "--out", disk / "s.lmdb")
        assert "is full" in messages(run(*command, new_process=True), 6)
        assert [path.name for path in disk.iterdir()] == ["fill"]


def test_unreadable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    drop = "-dac_override,-dac_read_search"
    prefix = ["setpriv", "--bounding-set", drop, "--inh-caps", drop] if os.geteuid() == 0 else []
    code = (
        "import sys\n"
        "from histopipe.errors import UsageError\n"
        "from histopipe.slides.discovery import discover\n"
        "for name in sys.argv[1:]:\n"
        "    try: discover([name])\n"
        "    except UsageError as error: print(error)"
    )
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code, ".", "locked/slide-000.svs"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(re.findall("locked.*Permission denied", done.stdout)) == 2


def test_level_refuses_mixed_scales(run: RunCommand, tmp_path: Path) -> None:
    make_slides(tmp_path / "in", "--size", "600x600", "--name", "a")
    make_slides(tmp_path / "in", "--size", "600x600", "--name", "b", "--mpp", "0.25")
    assert "--level 0 would mix scales: found 0.25 mpp (b000) and 0.499 mpp (a000)" in messages(
        run("ingest", "in", "--level", 0), 2
    )
    assert not (tmp_path / "patches.lmdb").exists()
    cluster = ("--cluster", "local:1", "--out", "parts")
    assert "would mix scales" in messages(run("ingest", "in", "--level", 0, *cluster), 2)
    assert run("ingest", "in", "--level", 0, "--allow-mixed-mpp").returncode == 0


def test_ingest_runs_without_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_slides(tmp_path / "in", "--size", "600x600")
    for name in ("tensorflow", "keras", "sklearn"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(ADDRESS)  # the fork server has loaded TensorFlow
    code = (
        "import sys\n"
        "from histopipe.cli import main\n"
        "for words in (['ingest', 'in', '--workers', '1'], ['train']):\n"
        "    sys.argv[1:] = words\n"
        "    try: main()\n"
        "    except SystemExit as end: print(f'{words[0]}: {end.code}')"
    )
    done = run_python(code, cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == ["ingest: 0", "train: 6"]
    assert "pip install 'histopipe[train]'" in done.stderr


def test_info(run: RunCommand, made_store: Path) -> None:
    value = json.loads(run("info", made_store, "--json").stdout)
    assert value["states"] == {"complete": 12}
    assert value["labels"] == {"normal": 6, "tumour": 6}
    assert value["patches"] == sum(slide["stored"] for slide in value["slides"]) > 500


def test_claims_are_exclusive_and_end_with_owner(tmp_path: Path) -> None:
    ours, theirs = Claims(tmp_path), Claims(tmp_path)
    assert ours.take(3)
    assert not theirs.take(3)
    assert theirs.take(4)
    ours.close()
    assert theirs.take(3)
    theirs.close()


def record(state: SlideState, **fields: Any) -> SlideRecord:
    fields = {"size_bytes": 100, "mtime_ns": 5, **fields}
    return SlideRecord(id="a", path="a.svs", resolved_path="/a.svs", state=state, **fields)


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
    settings = dict(options)
    mpp = settings.pop("mpp", None)
    job = SlideJob(SlideFile("a", path, (path,)), mpp=mpp)
    job.record = record
    outcome = find_early_outcome(job, IngestOptions(**settings))
    assert (outcome and outcome.status) is status
    if outcome is not None and Mpp(0.25) in options.values() and mpp != record.mpp:
        before = "an unknown scale" if record.mpp is None else f"{record.mpp:g} mpp"
        note = f"ingested with {before}.*0.25 mpp is not used"
        changed = mpp is not None or record.mpp_source not in ("mpp-csv", "properties")
        assert bool(re.search(note, "".join(outcome.notes))) is changed
