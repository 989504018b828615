"""Ingest on a cluster: a real scheduler and workers, some of which are killed, Slurm jobs, and local processes.

Slurm's programs are replaced.
"""

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

import cloudpickle
import dask
import lmdb
import pytest

from helpers.commands import COMMAND, INTERRUPTIBLE, RunCommand, small_disk
from helpers.faulty_server import FaultyServer, serving
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
from histopipe.geometry import Mpp
from histopipe.ingestion import cluster_ingest, dask_cluster
from histopipe.ingestion.cluster_ingest import ingest_on_cluster, parts_locked
from histopipe.ingestion.dask_cluster import ClusterSettings, DaskCluster, connected
from histopipe.ingestion.ingest_report import SlideOutcome, SlideStatus
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.slide_job import SlideJob
from histopipe.maintenance.verify import verify
from histopipe.slides.discovery import discover
from histopipe.store.catalog import Catalog, parts_of, read_catalog
from histopipe.store.store import Store, recorded
from histopipe.system.files import atomic_write
from histopipe.system.folders import CATALOG
from histopipe.system.output import Progress
from histopipe.tiling.spec import TilingSpec

SLIDES = 8
FLAGS = ("--patch-size", "64", "--tissue", "none")
ENVIRONMENT = {
    **os.environ,
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "4s",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
}


SBATCH = """#!/bin/sh
[ "$1" = --test-only ] && exit 0
cp "$1" "$JOBS/script"
setsid bash "$JOBS/script" >"$JOBS/log" 2>&1 &
touch "$JOBS/$!"
echo "Submitted batch job $!"
"""
SCANCEL = """#!/bin/sh
kill -TERM -- "-$1"
rm -f "$JOBS/$1"
"""
JOBQUEUE = """
jobqueue:
  slurm:
    cores: 2
    processes: 2
    memory: 2GB
    walltime: "01:00:00"
    queue: main
    scheduler-options: {host: 127.0.0.1, dashboard: false}
    worker-extra-args: [--host, 127.0.0.1, --no-dashboard]
distributed.deploy.lost-worker-timeout: 1s
"""


class Machines:
    """A scheduler and workers, each in a separate process group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        """Start all processes, on the same disks as before."""
        file = self.folder / "scheduler.json"
        file.unlink(missing_ok=True)
        self.scheduler = self._start("scheduler", "--port", "0", "--scheduler-file", str(file))
        wait_for(lambda: file.exists() and bool(file.read_text().strip()))
        self.address = json.loads(file.read_text())["address"]
        self.workers = [
            self._start(
                *("worker", self.address, "--nthreads", "1"),
                *("--local-directory", str(self.folder / f"dask-{number}")),
                *(["--no-nanny"] if number else []),  # one process instead of two
            )
            for number in range(3)
        ]

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            signal_group(process, signal.SIGKILL)
            process.wait()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", *words, "--host", "127.0.0.1", "--no-dashboard"]
        with (self.folder / "dask.log").open("ab") as log:
            return subprocess.Popen(
                command, start_new_session=True, stdout=log, stderr=log, env=ENVIRONMENT
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
        for suffix in ("svs", "geojson"):
            source = folder / f"slide-00{number % 2}.{suffix}"
            shutil.copy(source, folder / f"slide-00{number}.{suffix}")
    rows = [f"slide-00{number},{'nt'[number % 2]}\n" for number in range(SLIDES)]
    (folder / "labels.csv").write_text("slide,label\n" + "".join(rows))
    return folder


@pytest.fixture(scope="module")
def local(slides: Path) -> Path:
    """A store of the same slides, ingested without a cluster."""
    store = slides.with_name("local.lmdb")
    command = [*COMMAND, "ingest", str(slides), "--out", str(store), *FLAGS]
    subprocess.run(command, check=True, capture_output=True)
    return store


Ingest = Callable[[], "subprocess.Popen[str]"]
IMPATIENT = """
from histopipe.cli import main
from histopipe.ingestion import dask_cluster
dask_cluster._SECONDS = 10.0
main()
"""
"""The command with a time limit of 10 instead of 30 seconds for a lost scheduler."""


def start_ingest(
    slides: Path, folder: Path, environment: dict[str, str], cluster: str, *flags: str
) -> subprocess.Popen[str]:
    """Start an ingest on a cluster into `parts`."""
    words = ["--out", "parts", *FLAGS, "--scratch", "scratch", "--cluster", cluster, *flags]
    return subprocess.Popen(
        [*INTERRUPTIBLE[:-1], sys.executable, "-c", IMPATIENT, "ingest", str(slides), *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def ingest(machines: Machines, slides: Path, tmp_path: Path) -> Ingest:
    """Starts an ingest on these machines."""
    return lambda: start_ingest(slides, tmp_path, ENVIRONMENT, machines.address, "--json")


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    output = process.communicate(timeout=240)
    assert process.returncode == code, output
    assert "Traceback" not in output[1]
    return output


def check_all(parts: Path, local: Path, run: RunCommand) -> None:
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
    assert run("merge", parts, "--out", merged).returncode == 0
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
    ingest: Ingest, machines: Machines, local: Path, tmp_path: Path, slides: Path, run: RunCommand
) -> None:
    process = ingest()
    wait_for(lambda: begun(tmp_path / "scratch", 2))
    signal_group(machines.workers[0], signal.SIGKILL)
    out, _ = ended(process)
    assert {slide["status"] for slide in json.loads(out)["slides"]} == {"complete"}
    check_all(tmp_path / "parts", local, run)
    assert {path.name for path in (tmp_path / "parts").iterdir()} >= {
        CATALOG,
        "ingest.log",
        "ingest.csv",
    }
    # New labels are written into the parts. No slide is ingested again.
    rows = "".join(f"slide-00{n},x\n" for n in range(SLIDES))
    (tmp_path / "labels.csv").write_text("slide,label\n" + rows)
    flags = ("--cluster", "local:1", "--labels", "labels.csv", "--scratch", "scratch", "--json")
    done = run("ingest", slides, "--out", "parts", *FLAGS, *flags)
    assert {slide["status"] for slide in json.loads(done.stdout)["slides"]} == {"skipped"}
    assert {record.label for record in recorded(tmp_path / "parts").values()} == {"x"}


@pytest.mark.nightly(reason="a scheduler and three workers, one of which is paused for seconds")
def test_paused_worker_adds_no_duplicates(
    ingest: Ingest, machines: Machines, local: Path, tmp_path: Path, run: RunCommand
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
    ingest: Ingest, machines: Machines, local: Path, tmp_path: Path, run: RunCommand
) -> None:
    process = ingest()
    wait_for(lambda: begun(tmp_path / "scratch", 3))
    signal_group(machines.scheduler, signal.SIGKILL)
    _, stderr = ended(process, 6)
    assert f"the scheduler at {machines.address} is lost" in stderr
    machines.close()
    machines.start()
    out, _ = ended(ingest())
    statuses = {slide["status"] for slide in json.loads(out)["slides"]}
    assert statuses <= {"complete", "skipped"}
    check_all(tmp_path / "parts", local, run)


def test_wrong_output_is_refused(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        ("local", UsageError, "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1", UsageError, "--cluster"),
        ("tcp://127.0.0.1:abc", UsageError, "--cluster"),
        ("ucx://127.0.0.1:1", UsageError, "--cluster"),
        ("tls://127.0.0.1:1", UsageError, "--cluster"),
        ("tcp://127.0.0.1:9", MachineShort, r"no scheduler responds at tcp://127\.0\.0\.1:9"),
    ],
)
def test_wrong_clusters_are_refused(
    monkeypatch: pytest.MonkeyPatch, cluster: str, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(dask_cluster, "_SECONDS", 1.0)
    with pytest.raises(error, match=message), connected(cluster):
        pass


@pytest.mark.parametrize(
    ("sbatch", "error", "message"),
    [
        ("", MachineShort, "needs `sbatch`"),
        ("#!/bin/sh\necho no partition >&2; exit 1", UsageError, "rejects the job: found no part"),
    ],
)
def test_missing_sbatch_and_rejected_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sbatch: str,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sbatch").write_text(sbatch)
    (tmp_path / "sbatch").chmod(0o755 if sbatch else 0)
    with pytest.raises(error, match=message):
        dask_cluster._check_job(SimpleNamespace(job_script=str))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return an environment in which `sbatch` starts a process group, and `scancel` ends it."""
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (tmp_path / "dask").mkdir()
    (tmp_path / "dask" / "jobqueue.yaml").write_text(JOBQUEUE)
    yield {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "JOBS": str(jobs),
        "DASK_CONFIG": str(tmp_path / "dask"),
    }
    left = [path.name for path in jobs.iterdir() if path.name.isdigit()]
    for job in left:
        os.killpg(int(job), signal.SIGKILL)
    assert not left, "a job was not cancelled"


HOLD = """
import os, time
from histopipe.ingestion import planning

original = planning.plan_slide

def plan_slide(slide, *arguments):
    while slide.id == "slide-001" and not os.path.exists(os.environ["RELEASED"]):
        time.sleep(0.05)
    return original(slide, *arguments)

plan_slide.__module__ = original.__module__
planning.plan_slide = plan_slide
"""


def with_hold(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which the plan of slide-001 waits for the file `released`."""
    (folder / "hold").mkdir()
    (folder / "hold" / "sitecustomize.py").write_text(HOLD)
    path = os.pathsep.join([str(folder / "hold"), environment.get("PYTHONPATH", "")])
    return {**environment, "PYTHONPATH": path, "RELEASED": str(folder / "released")}


@pytest.mark.nightly(reason="starts workers several times")
def test_ended_slurm_jobs_are_replaced(slides: Path, tmp_path: Path, slurm: dict[str, str]) -> None:
    process = start_ingest(slides, tmp_path, slurm, "slurm:1", "--part-gb", "0.001")
    wait_for(lambda: any(tmp_path.glob("parts/part-*.lmdb")))  # large parts are published
    (job,) = [path for path in (tmp_path / "jobs").iterdir() if path.name.isdigit()]
    job.unlink()
    os.killpg(int(job.name), signal.SIGKILL)  # as Slurm does at the time limit
    ended(process)
    catalog = read_catalog(tmp_path / "parts")
    assert catalog is not None
    assert len(catalog.slides) == SLIDES and len(catalog.parts) > 1


@pytest.mark.nightly(reason="starts workers, and interrupts them")
@pytest.mark.parametrize("cluster", ["slurm:1", "local:1"])
def test_interrupted_ingest_publishes_complete_slides(
    slides: Path, tmp_path: Path, slurm: dict[str, str], cluster: str
) -> None:
    """They are published when the slide in progress ends, and others are not ingested.

    A terminal sends the signal to all processes; the command handles it.
    """
    process = start_ingest(slides, tmp_path, with_hold(tmp_path, slurm), cluster)
    assert process.stderr is not None and any("complete slide-" in line for line in process.stderr)
    os.killpg(process.pid, signal.SIGINT)
    assert any("publishing complete slides" in line for line in process.stderr)
    (tmp_path / "released").touch()
    ended(process, 130)
    catalog = read_catalog(tmp_path / "parts")
    assert catalog is not None
    assert 1 <= len(catalog.slides) < SLIDES


def _run_slide_or_die(
    settings: ClusterSettings, job: SlideJob, topic: str
) -> tuple[SlideOutcome, str]:
    if job.id == "slide-002":
        os._exit(1)
    return dask_cluster.run_slide(settings, job, topic)


@pytest.mark.nightly(reason="kills workers")
def test_slide_that_kills_every_worker_fails(
    slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import distributed.scheduler  # noqa: F401 - reads its settings at import

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(cluster_ingest, "run_slide", _run_slide_or_die)
    with dask.config.set({"distributed.scheduler.allowed-failures": 1}):
        report = ingest_on_cluster(
            [SlideJob(file) for file in discover([slides])],
            tmp_path / "parts",
            TilingSpec(patch_size=64, mpp=Mpp(0.5), tissue="none"),
            IngestOptions(),
            cluster="local:1",
            scratch=tmp_path / "scratch",
            part_bytes=1 << 30,
            progress=Progress(),
        )
    assert list(report.failed) == ["slide-002"]
    assert "every worker that ingested it died" in report.failed["slide-002"]
    assert len(report.of(SlideStatus.COMPLETE)) == SLIDES - 1


def ingest_locally(slides: Path, run: RunCommand, *flags: str, code: int = 0) -> str:
    """Ingest on a cluster of one worker, and return the messages."""
    cluster = ("--cluster", "local:1", "--scratch", "scratch")
    done = run("ingest", slides, "--out", "parts", *FLAGS, *cluster, *flags)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.long(reason="starts a cluster with a worker, which imports Dask")
def test_local_cluster_equals_ingest(
    slides: Path, tmp_path: Path, run: RunCommand, inline_workers: None
) -> None:
    """The worker stages the slides; one comes from a web server."""
    paths = sorted(slides.glob("*.svs"))[:2]
    with serving(FaultyServer(folder=slides)) as server:
        sources = [f"{server.url}/{paths[0].name}", str(paths[1])]
        flags = ("--cluster", "local:1", "--scratch", "scratch", "--stage", tmp_path / "stage")
        done = run("ingest", *sources, "--out", "parts", *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "stage").iterdir())
    assert run("ingest", *paths, "--out", "plain.lmdb", *FLAGS).returncode == 0
    (part,) = parts_of(tmp_path / "parts")
    parts, plain = read_slides(part), read_slides(tmp_path / "plain.lmdb")
    assert [record.path for record, *_ in parts.values()] == sources
    assert parts.keys() == plain.keys() and parts["slide-001"] == plain["slide-001"]
    assert parts["slide-000"][1:] == plain["slide-000"][1:]  # the records differ by the path


@pytest.mark.nightly(reason="starts workers twice")
def test_abandoned_parts_are_removed(slides: Path, tmp_path: Path, run: RunCommand) -> None:
    """One process was killed when it started a part, another between moving a part and removing it."""
    ingest_locally(slides, run)
    (part,) = (tmp_path / "parts").glob("part-*.lmdb")
    catalog = read_catalog(tmp_path / "parts")
    assert catalog is not None
    folder = tmp_path / "scratch" / f"histopipe-{catalog.uuid}"
    assert not folder.exists()
    shutil.copytree(part, folder / part.stem / part.name)
    started = folder / "part-begun" / "part-begun.lmdb"
    started.mkdir(parents=True)
    lmdb.open(str(started), max_dbs=8).close()
    ingest_locally(slides, run)
    assert not folder.exists()
    assert [path.name for path in (tmp_path / "parts").glob("part-*")] == [part.name]


@pytest.mark.nightly(reason="starts workers")
def test_full_scratch_disk_is_reported(slides: Path, tmp_path: Path, run: RunCommand) -> None:
    with small_disk(tmp_path / "scratch", "1536k"):
        assert "disk" in ingest_locally(slides, run, code=6)


@pytest.mark.nightly(reason="starts workers three times")
def test_forced_ingest_keeps_label_and_patient(
    slides: Path, tmp_path: Path, run: RunCommand
) -> None:
    """Later annotations label the slides."""
    folder = tmp_path / "own"
    shutil.copytree(slides, folder)
    (tmp_path / "labels.csv").write_text("slide,label,patient\nslide-000,a,p1\n")
    ingest_locally(folder, run, "--labels", "labels.csv")
    shutil.copy(slides / "slide-001.svs", folder / "slide-000.svs")
    (folder / "labels.csv").unlink()
    ingest_locally(folder, run, "--force")
    labels = {r.id: (r.label, r.patient) for r in recorded(tmp_path / "parts").values()}
    assert labels["slide-000"] == ("a", "p1")
    ingest_locally(folder, run, "--annotations", str(slides))
    records = recorded(tmp_path / "parts")
    assert len(records) == SLIDES
    assert all(sum(record.patch_labels.values()) for record in records.values())


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
