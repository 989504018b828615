"""Ingest on a cluster: a real scheduler and three workers on this machine, some of which are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest

import histopipe
from helpers.commands import COMMAND, Run
from helpers.slides import make_slides
from helpers.stores import a_store, jpegs, read_slides
from histopipe.errors import (
    DamagedStore,
    ExitCode,
    MachineShort,
    UnknownVersion,
    UsageError,
    WorkerLost,
)
from histopipe.ingestion.cluster.cluster_ingest import parts_locked
from histopipe.ingestion.cluster.dask_cluster import DaskCluster, connected
from histopipe.maintenance.verify import verify
from histopipe.store.catalog import Catalog, parts_of, read_catalog
from histopipe.store.store import Store, recorded
from histopipe.system.files import CATALOG, atomic_write

DASK = [sys.executable, "-m", "dask"]
SLIDES = 8
FLAGS = ("--patch-size", "64", "--tissue", "none")
ENVIRONMENT = {
    **os.environ,
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "4s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
}


class Machines:
    """A scheduler and workers, each in a separate process group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.scheduler = self._start_scheduler()
        self.workers = [self._start_worker(number) for number in range(3)]

    def restart(self) -> None:
        """Restart all processes, on the same disks."""
        self.close()
        self.scheduler = self._start_scheduler()
        self.workers = [self._start_worker(number) for number in range(3)]

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            signal_group(process, signal.SIGKILL)
            process.wait()

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        file = self.folder / "scheduler.json"
        file.unlink(missing_ok=True)
        words = [
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            str(file),
        ]
        process = self._start(words)
        until = time.monotonic() + 60
        while not (file.exists() and file.read_text().strip()):
            assert time.monotonic() < until
            time.sleep(0.05)
        self.address = json.loads(file.read_text())["address"]
        return process

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        words = ["worker", self.address, "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"]
        if number:
            words.append("--no-nanny")  # one process instead of two
        return self._start([*words, "--local-directory", str(self.folder / f"dask-{number}")])

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "dask.log").open("ab") as log:
            return subprocess.Popen(
                [*DASK, *words], start_new_session=True, stdout=log, stderr=log, env=ENVIRONMENT
            )


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    yield machines
    machines.close()


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster") / "slides"
    make_slides(folder, "--count", "2", "--size", "2048x2048")  # drawing slides is slow
    for number in range(2, SLIDES):
        shutil.copy(folder / f"slide-00{number % 2}.svs", folder / f"slide-00{number}.svs")
    rows = [
        f"slide-00{number},{'normal' if number % 2 else 'tumour'}\n" for number in range(SLIDES)
    ]
    (folder / "labels.csv").write_text("slide,label\n" + "".join(rows))
    return folder


@pytest.fixture(scope="module")
def local(slides: Path) -> Path:
    """A store of the same slides, ingested without a cluster."""
    store = slides.with_name("local.lmdb")
    subprocess.run(
        [*COMMAND, "ingest", str(slides), "--out", str(store), *FLAGS],
        check=True,
        capture_output=True,
    )
    return store


Ingest = Callable[[], "subprocess.Popen[str]"]
IMPATIENT = """
from histopipe.cli import main
from histopipe.ingestion.cluster import dask_cluster
dask_cluster._SECONDS = 10.0
main()
"""
"""The command with a time limit of 10 instead of 30 seconds for a lost scheduler."""


@pytest.fixture
def ingest(machines: Machines, slides: Path, tmp_path: Path) -> Ingest:
    """Starts an ingest on the cluster into `parts`."""

    def begin() -> subprocess.Popen[str]:
        words = ["ingest", str(slides), "--out", "parts", *FLAGS, "--cluster", machines.address]
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                IMPATIENT,
                *words,
                "--scratch",
                str(tmp_path / "scratch"),
                "--json",
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    return begin


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    output = process.communicate(timeout=240)
    assert process.returncode == code, output
    return output


def check_all(parts: Path, local: Path, run: Run) -> None:
    """Check that every slide is in one part, equal to the local ingest, and that no part is damaged."""
    catalog = read_catalog(parts)
    assert catalog is not None and len(catalog.slides) == SLIDES
    expected = read_slides(local)
    all_slides: dict[str, object] = {}
    for part in catalog.parts:
        assert verify(part).findings == []
        slides = read_slides(part)
        assert not all_slides.keys() & slides.keys()
        all_slides |= slides
    assert all_slides == expected
    merged = parts.with_name("merged.lmdb")
    done = run("merge", parts, "--out", merged)
    assert done.returncode == 0, done.stderr
    assert read_slides(merged) == expected
    shutil.rmtree(merged)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def begun(scratch: Path, count: int) -> bool:
    """Return whether at least `count` workers have started parts of some size."""
    files = scratch.glob("*/part-*/*.lmdb/data.mdb")
    return sum(file.stat().st_size > 300_000 for file in files) >= count


@pytest.mark.nightly(
    reason="a scheduler and three workers; test_local_cluster_equals_ingest has one worker"
)
def test_killed_worker_loses_no_slides(
    ingest: Ingest, machines: Machines, local: Path, tmp_path: Path, slides: Path, run: Run
) -> None:
    process = ingest()
    wait_for(lambda: begun(tmp_path / "scratch", 2))
    signal_group(machines.workers[0], signal.SIGKILL)
    out, stderr = ended(process)
    assert {slide["status"] for slide in json.loads(out)["slides"]} == {"complete"}
    assert "Traceback" not in stderr
    check_all(tmp_path / "parts", local, run)
    assert {path.name for path in (tmp_path / "parts").iterdir()} >= {
        CATALOG,
        "ingest.log",
        "ingest.csv",
    }
    with histopipe.open_store(tmp_path / "parts") as store:
        assert len(store.complete) == len(store.slides) == SLIDES
        assert len(store.index(store.number("slide-001"))["crc"])
    # New labels are written into the parts. No slide is ingested again.
    rows = "".join(f"slide-00{n},x\n" for n in range(SLIDES))
    (tmp_path / "labels.csv").write_text("slide,label\n" + rows)
    flags = ("--cluster", "local:1", "--labels", "labels.csv", "--scratch", "scratch", "--json")
    done = run("ingest", slides, "--out", "parts", *FLAGS, *flags)
    assert {slide["status"] for slide in json.loads(done.stdout)["slides"]} == {"skipped"}
    assert {record.label for record in recorded(tmp_path / "parts").values()} == {"x"}


@pytest.mark.nightly(reason="a scheduler and three workers, one of which is paused for seconds")
def test_paused_worker_adds_no_duplicates(
    ingest: Ingest, machines: Machines, local: Path, tmp_path: Path, run: Run
) -> None:
    process = ingest()
    wait_for(lambda: begun(tmp_path / "scratch", 2))
    signal_group(machines.workers[1], signal.SIGSTOP)
    ended(process)
    check_all(tmp_path / "parts", local, run)
    signal_group(machines.workers[1], signal.SIGCONT)
    time.sleep(3)
    out, _ = ended(ingest())
    assert {slide["status"] for slide in json.loads(out)["slides"]} == {"skipped"}
    check_all(tmp_path / "parts", local, run)


@pytest.mark.nightly(reason="starts all machines twice, and waits for timeouts")
def test_lost_scheduler(
    ingest: Ingest, machines: Machines, local: Path, tmp_path: Path, run: Run
) -> None:
    process = ingest()
    wait_for(lambda: begun(tmp_path / "scratch", 3))
    signal_group(machines.scheduler, signal.SIGKILL)
    _, stderr = ended(process, 6)
    assert f"the scheduler at {machines.address} is lost" in stderr
    assert "Traceback" not in stderr
    machines.restart()
    out, _ = ended(ingest())
    statuses = [slide["status"] for slide in json.loads(out)["slides"]]
    assert set(statuses) <= {"complete", "skipped"}
    check_all(tmp_path / "parts", local, run)


def test_wrong_cluster_and_output_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected tcp://HOST:PORT"), connected("local"):
        pass
    (tmp_path / "s.lmdb").mkdir()
    with pytest.raises(UsageError, match="a folder for parts"), parts_locked(tmp_path / "s.lmdb"):
        pass
    with (
        parts_locked(tmp_path / "parts"),
        pytest.raises(UsageError, match="another run is ingesting into"),
        parts_locked(tmp_path / "parts"),
    ):
        pass


def test_lost_local_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(subscribe_topic=lambda *_: None, status="running")
    local = SimpleNamespace(workers={})
    with pytest.raises(WorkerLost, match="all workers of --cluster local:2 ended"):
        DaskCluster(client, "local:2", local=local).workers()

    def fail(**_: object) -> None:
        # A restart takes longer than Dask's default of 15 s if the machine is busy.
        assert dask.config.get("distributed.deploy.lost-worker-timeout") == "120s"
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr("distributed.LocalCluster", fail)
    expected = "workers of --cluster local:2 cannot be started: found Nanny failed"
    with pytest.raises(WorkerLost, match=expected) as raised, connected("local:2"):
        pass
    assert raised.value.exit_code is ExitCode.SHORT


def test_missing_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("histopipe.ingestion.cluster.dask_cluster._SECONDS", 1.0)
    with (
        pytest.raises(MachineShort, match=r"no scheduler responds at tcp://127\.0\.0\.1:9"),
        connected("tcp://127.0.0.1:9"),
    ):
        pass


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
    with Store(local) as store:
        names = [record.id for record in store.slides]
    catalog = Catalog(tmp_path)
    catalog.slides = {name: f"part-{'ab'[n % 2]}.lmdb" for n, name in enumerate(names)}
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
