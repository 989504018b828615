"""Ingest on a cluster: a real scheduler and workers, some of which are killed, Slurm jobs, and local processes.

Slurm's programs are replaced.
"""

from __future__ import annotations

import json
import os
import shlex
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

from helpers.commands import COMMAND, INTERRUPTIBLE, RunCommand
from helpers.faulty_server import FaultyServer, serving
from helpers.paths import PROJECT
from helpers.slides import make_slides
from helpers.stores import read_slides
from histopipe.errors import ExitCode, MachineShort, UsageError, WorkerLost
from histopipe.maintenance.verify import verify
from histopipe.store.store import Store, parts_of, read_catalog, recorded
from histopipe.system import cluster_parts
from histopipe.system.cluster_parts import DaskCluster, connected
from histopipe.system.folders import CATALOG

SLIDES = 24
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
            shutil.copy(source, folder / f"slide-{number:03}.{suffix}")
    rows = [f"slide-{number:03},{'nt'[number % 2]}\n" for number in range(SLIDES)]
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
from histopipe.system import cluster_parts
cluster_parts._SECONDS = 10.0
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


def published(folder: Path, count: int) -> bool:
    """Return whether at least `count` parts are published, while others are in progress."""
    return sum(1 for _ in (folder / "parts").glob("part-*.lmdb")) >= count


@pytest.mark.nightly(
    reason="a scheduler and three workers; test_local_cluster_equals_ingest has one worker"
)
def test_killed_worker_loses_no_slides(
    ingest: Ingest, machines: Machines, local: Path, tmp_path: Path, slides: Path, run: RunCommand
) -> None:
    process = ingest()
    wait_for(lambda: published(tmp_path, 2))
    signal_group(machines.workers[0], signal.SIGKILL)
    out, _ = ended(process)
    assert {slide["status"] for slide in json.loads(out)["slides"]} <= {"complete", "skipped"}
    check_all(tmp_path / "parts", local, run)
    assert {path.name for path in (tmp_path / "parts").iterdir()} >= {
        CATALOG,
        "ingest.log",
        "ingest.csv",
    }
    # New labels are written into the parts. No slide is ingested again.
    rows = "".join(f"slide-{n:03},x\n" for n in range(SLIDES))
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
    wait_for(lambda: published(tmp_path, 2))
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
    wait_for(lambda: published(tmp_path, 2))
    signal_group(machines.scheduler, signal.SIGKILL)
    _, stderr = ended(process, 6)
    assert f"the scheduler at {machines.address} is lost" in stderr
    machines.close()
    machines.start()
    out, _ = ended(ingest())
    statuses = {slide["status"] for slide in json.loads(out)["slides"]}
    assert statuses <= {"complete", "skipped"}
    check_all(tmp_path / "parts", local, run)


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
    monkeypatch.setattr(cluster_parts, "_SECONDS", 1.0)
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
        cluster_parts._check_job(SimpleNamespace(job_script=str))


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
    while slide.id == "slide-003" and not os.path.exists(os.environ["RELEASED"]):
        time.sleep(0.05)
    return original(slide, *arguments)

plan_slide.__module__ = original.__module__
planning.plan_slide = plan_slide
"""


KILL = """
import os
from histopipe.ingestion import planning

original = planning.plan_slide

def plan_slide(slide, *arguments):
    if slide.id == "slide-002":
        os._exit(1)
    return original(slide, *arguments)

plan_slide.__module__ = original.__module__
planning.plan_slide = plan_slide
"""


def with_hold(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which the plan of slide-003 waits for the file `released`."""
    (folder / "hold").mkdir()
    (folder / "hold" / "sitecustomize.py").write_text(HOLD)
    path = os.pathsep.join([str(folder / "hold"), environment.get("PYTHONPATH", "")])
    return {**environment, "PYTHONPATH": path, "RELEASED": str(folder / "released")}


@pytest.mark.nightly(reason="five commands")
def test_array_of_jobs_ingests_and_joins(
    slides: Path, local: Path, tmp_path: Path, run: RunCommand
) -> None:
    """The script of the documentation, with the index of each task in the environment."""
    script = PROJECT / "docs" / "clusters" / "ingest.sbatch"
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "histopipe"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, COMMAND))} "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    words = ["bash", str(script), str(slides), "parts", *FLAGS]
    for task, flags in ((1, ()), (2, ()), (4, ()), (3, ()), (1, ("--join",))):
        subprocess.run(
            [*words, *flags],
            cwd=tmp_path,
            env={**environment, "SLURM_ARRAY_TASK_ID": f"{task}", "SLURM_TMPDIR": str(tmp_path)},
            check=True,
            capture_output=True,
        )
    check_all(tmp_path / "parts", local, run)


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
    """A part is interrupted when a task in progress ends, and other parts are not begun.

    A terminal sends the signal to all processes; the command handles it.
    """
    process = start_ingest(slides, tmp_path, with_hold(tmp_path, slurm), cluster)
    assert process.stderr is not None and any("complete slide-" in line for line in process.stderr)
    os.killpg(process.pid, signal.SIGINT)
    assert any("the parts keep what is complete" in line for line in process.stderr)
    (tmp_path / "released").touch()
    ended(process, 130)
    published = []
    for part in (tmp_path / "parts").glob("part-*.lmdb"):
        with Store(part) as store:
            published += [record.id for record in store.complete.values()]
    assert 1 <= len(published) < SLIDES


@pytest.mark.nightly(reason="starts workers, whose processes die")
def test_slide_that_kills_its_process_fails_alone(slides: Path, tmp_path: Path) -> None:
    (tmp_path / "kill").mkdir()
    (tmp_path / "kill" / "sitecustomize.py").write_text(KILL)
    path = os.pathsep.join([str(tmp_path / "kill"), os.environ.get("PYTHONPATH", "")])
    process = start_ingest(
        slides, tmp_path, {**ENVIRONMENT, "PYTHONPATH": path}, "local:2", "--json"
    )
    out, _ = ended(process, 3)
    slides_by_status = {slide["id"]: slide["status"] for slide in json.loads(out)["slides"]}
    assert slides_by_status.pop("slide-002") == "failed"
    assert len(slides_by_status) == SLIDES - 1 and set(slides_by_status.values()) == {"complete"}


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
    parts = {k: v for part in parts_of(tmp_path / "parts") for k, v in read_slides(part).items()}
    plain = read_slides(tmp_path / "plain.lmdb")
    assert [parts[name][0].path for name in sorted(parts)] == sources
    assert parts.keys() == plain.keys() and parts["slide-001"] == plain["slide-001"]
    assert parts["slide-000"][1:] == plain["slide-000"][1:]  # the records differ by the path
