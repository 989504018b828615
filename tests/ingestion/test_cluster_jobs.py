"""Ingest on a cluster that the command starts: Slurm jobs (with substitutes for Slurm's programs), local processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import lmdb
import pytest

from helpers.commands import INTERRUPTIBLE, Run
from helpers.faulty_server import FaultyServer, serving
from helpers.slides import make_slides
from helpers.stores import read_slides
from histopipe.errors import UsageError
from histopipe.geometry import Mpp
from histopipe.ingestion.cluster import cluster_ingest, dask_cluster
from histopipe.ingestion.cluster.cluster_ingest import ingest_on_cluster
from histopipe.ingestion.cluster.dask_cluster import ClusterSettings
from histopipe.ingestion.ingest_report import SlideOutcome, SlideStatus
from histopipe.ingestion.options import IngestOptions
from histopipe.ingestion.slide_job import SlideJob
from histopipe.slides.discovery import discover
from histopipe.store.catalog import parts_of, read_catalog
from histopipe.store.store import recorded
from histopipe.system.output import Progress
from histopipe.tiling.spec import TilingSpec

FLAGS = ("--patch-size", "64", "--tissue", "none", "--scratch", "scratch")
SLIDES = 6

SBATCH = """#!/bin/sh
if [ "$1" = --test-only ]; then
  grep -q 'SBATCH -p nowhere' && { echo 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1; }
  exit 0
fi
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
    queue: {queue}
    scheduler-options: {{host: 127.0.0.1, dashboard: false}}
    worker-extra-args: [--host, 127.0.0.1, --no-dashboard]
distributed.deploy.lost-worker-timeout: 1s
"""


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs") / "slides"
    make_slides(folder, "--count", "2", "--size", "2048x2048")  # drawing slides is slow
    for number in range(2, SLIDES):
        for suffix in ("svs", "geojson"):
            shutil.copy(
                folder / f"slide-00{number % 2}.{suffix}", folder / f"slide-00{number}.{suffix}"
            )
    rows = [f"slide-00{number},tumour\n" for number in range(SLIDES)]
    (folder / "labels.csv").write_text("slide,label\n" + "".join(rows))
    return folder


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
    configure(tmp_path, "main")
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


def configure(folder: Path, queue: str) -> None:
    (folder / "dask").mkdir(exist_ok=True)
    (folder / "dask" / "jobqueue.yaml").write_text(JOBQUEUE.format(queue=queue))


def begin(
    slides: Path, folder: Path, environment: dict[str, str], *flags: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*INTERRUPTIBLE, "ingest", str(slides), "--out", "parts", *FLAGS, *flags],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


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


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    while text not in (line := process.stderr.readline()):
        assert line, "the process has ended"


@pytest.mark.nightly(reason="starts workers several times")
def test_ended_slurm_jobs_are_replaced(
    slides: Path, tmp_path: Path, slurm: dict[str, str], run: Run
) -> None:
    process = begin(slides, tmp_path, slurm, "--cluster", "slurm:1", "--part-gb", "0.001")
    until = time.monotonic() + 60
    while not list(tmp_path.glob("parts/part-*.lmdb")):  # large parts are published
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
    (job,) = [path for path in (tmp_path / "jobs").iterdir() if path.name.isdigit()]
    job.unlink()
    os.killpg(int(job.name), signal.SIGKILL)  # as Slurm does at the time limit
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    catalog = read_catalog(tmp_path / "parts")
    assert catalog is not None
    assert len(catalog.slides) == SLIDES
    assert len(catalog.parts) > 1
    # A command that needs one store explains that this is a folder of parts.
    done = run("info", tmp_path / "parts")
    assert done.returncode == 4
    assert "found a folder of parts, expected one store" in done.stderr
    assert "`histopipe merge`" in done.stderr


@pytest.mark.nightly(reason="starts workers, and interrupts them")
@pytest.mark.parametrize("cluster", ["slurm:1", "local:1"])
def test_interrupted_ingest_publishes_complete_slides(
    slides: Path, tmp_path: Path, slurm: dict[str, str], cluster: str
) -> None:
    """They are published when the slide in progress ends, and others are not ingested.

    A terminal sends the signal to all processes; the command handles it.
    """
    process = begin(slides, tmp_path, with_hold(tmp_path, slurm), "--cluster", cluster)
    wait_for_line(process, "complete slide-")
    os.killpg(process.pid, signal.SIGINT)
    wait_for_line(process, "publishing complete slides")
    (tmp_path / "released").touch()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    catalog = read_catalog(tmp_path / "parts")
    assert catalog is not None
    assert 1 <= len(catalog.slides) < SLIDES


@pytest.mark.nightly(reason="starts two commands")
def test_rejected_job_and_missing_sbatch(
    slides: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    configure(tmp_path, "nowhere")
    process = begin(slides, tmp_path, slurm, "--cluster", "slurm:1")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2, stderr
    assert "sbatch rejects the job" in stderr
    assert "invalid partition specified: nowhere" in stderr
    process = begin(
        slides,
        tmp_path,
        {**slurm, "PATH": str(Path(sys.executable).parent)},
        "--cluster",
        "slurm:1",
    )
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 6, stderr
    assert "needs `sbatch`" in stderr


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
    import dask
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
    (failed,) = report.of(SlideStatus.FAILED)
    assert failed.id == "slide-002"
    assert "every worker that ingested it died" in failed.reason
    assert len(report.of(SlideStatus.COMPLETE)) == SLIDES - 1


def local(slides: Path, run: Run, *flags: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run("ingest", slides, "--out", "parts", *FLAGS, "--cluster", "local:1", *flags)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.long(reason="starts a cluster with a worker, which imports Dask")
def test_local_cluster_equals_ingest(
    slides: Path, tmp_path: Path, run: Run, inline_workers: None
) -> None:
    """The worker stages the slides; one comes from a web server."""
    paths = sorted(slides.glob("*.svs"))[:2]
    with serving(FaultyServer(folder=slides)) as server:
        sources = [f"{server.url}/{paths[0].name}", str(paths[1])]
        flags = ("--cluster", "local:1", "--stage", tmp_path / "stage")
        done = run("ingest", *sources, "--out", "parts", *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "stage").iterdir())
    done = run("ingest", *paths, "--out", "plain.lmdb", *FLAGS[:4])
    assert done.returncode == 0, done.stderr
    (part,) = parts_of(tmp_path / "parts")
    parts, plain = read_slides(part), read_slides(tmp_path / "plain.lmdb")
    assert [record.path for record, *_ in parts.values()] == sources
    assert parts.keys() == plain.keys() and parts["slide-001"] == plain["slide-001"]
    assert parts["slide-000"][1:] == plain["slide-000"][1:]  # the records differ by the path


@pytest.mark.nightly(reason="starts workers twice")
def test_abandoned_parts_are_removed(slides: Path, tmp_path: Path, run: Run) -> None:
    """One process was killed when it started a part, another between moving a part and removing it."""
    local(slides, run)
    (part,) = (tmp_path / "parts").glob("part-*.lmdb")
    catalog = read_catalog(tmp_path / "parts")
    assert catalog is not None
    folder = tmp_path / "scratch" / f"histopipe-{catalog.uuid}"
    assert not folder.exists()
    shutil.copytree(part, folder / part.stem / part.name)
    begun = folder / "part-begun" / "part-begun.lmdb"
    begun.mkdir(parents=True)
    lmdb.open(str(begun), max_dbs=8).close()
    local(slides, run)
    assert not folder.exists()
    assert [path.name for path in (tmp_path / "parts").glob("part-*")] == [part.name]


@pytest.mark.nightly(reason="starts workers")
def test_full_scratch_disk_is_reported(slides: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "scratch").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1536k", "none", tmp_path / "scratch"],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        done = local(slides, run, code=6)
        assert "disk" in done.stderr
    finally:
        subprocess.run(["umount", "-l", tmp_path / "scratch"], check=True)


@pytest.mark.nightly(reason="starts workers three times")
def test_forced_ingest_keeps_label_and_patient(slides: Path, tmp_path: Path, run: Run) -> None:
    """Later annotations label the slides."""
    folder = tmp_path / "own"
    shutil.copytree(slides, folder)
    (tmp_path / "labels.csv").write_text("slide,label,patient\nslide-000,a,p1\n")
    local(folder, run, "--labels", "labels.csv")
    shutil.copy(slides / "slide-001.svs", folder / "slide-000.svs")
    (folder / "labels.csv").unlink()
    local(folder, run, "--force")
    records = recorded(tmp_path / "parts")
    record = next(record for record in records.values() if record.id == "slide-000")
    assert (record.label, record.patient) == ("a", "p1")
    local(folder, run, "--annotations", str(slides))
    records = recorded(tmp_path / "parts")
    assert len(records) == SLIDES
    assert all(sum(record.patch_labels.values()) for record in records.values())


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1", "tcp://127.0.0.1:abc", "ucx://127.0.0.1:1", "tls://127.0.0.1:1"]
)
def test_invalid_addresses_are_errors(address: str) -> None:
    with pytest.raises(UsageError, match="--cluster"), dask_cluster.connected(address):
        pass
