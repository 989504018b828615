"""Real faults during an ingest. Afterwards every complete slide is intact, and a second run completes the others."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb.verify
import pytest
import simplejpeg

from helpers.commands import COMMAND, RunCommand, pool_workers
from helpers.inline import run_tasks_here
from helpers.slides import CMU, make_slides
from helpers.stores import outcomes, read_store
from histopipe.errors import NothingToDo
from histopipe.ingestion.ingest import ingest
from histopipe.store.format import patch_key
from histopipe.store.store import Store
from histopipe.system.output import Progress

ARGUMENTS = ["--patch-size", "64", "--workers", "2"]


pytestmark = pytest.mark.usefixtures("inline_workers")


def check_store(path: Path) -> set[str]:
    """Check every structure, checksum and image of a store, and return the ids of its complete slides."""
    with Store(path) as store:
        for number, record in store.complete.items():
            index = store.index(number)
            assert record.planned == record.stored + record.unreadable == len(index["crc"])
            for row in range(record.planned):
                value, key = store.value(number, row), patch_key(number, row)
                assert len(value) == index["length"][row]
                if value:
                    assert zlib.crc32(value, zlib.crc32(key)) == index["crc"][row]
                    height, width, _ = simplejpeg.decode_jpeg(value, strict=False).shape
                    assert height == width == store.patch_size
        return {record.id for record in store.complete.values()}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six slides with two routes: patches of 64 pixels are cut from tiles of 256, and copied from tiles of 64."""
    folder = tmp_path_factory.mktemp("cohort")
    make_slides(folder, "--size", "1800x1800", "--name", "cut")
    make_slides(folder, "--size", "1800x1800", "--name", "copied", "--tile", "64")
    for name in ("cut", "copied"):  # drawing slides is slow
        for number in (1, 2):
            shutil.copy(folder / f"{name}000.svs", folder / f"{name}00{number}.svs")
    (folder / "labels.csv").unlink()
    return folder


@pytest.fixture(scope="module")
def whole(cohort: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Contents of a store after an uninterrupted ingest."""
    store = tmp_path_factory.mktemp("whole") / "s.lmdb"
    with pytest.MonkeyPatch.context() as patch:
        run_tasks_here(store.parent, patch)
        ingest(cohort, store, patch_size=64, progress=Progress())
    contents = read_store(store)
    assert {record[1]["route"] for record in contents.values()} == {"copy", "decode"}
    return contents


@pytest.mark.long(reason="starts a command, kills it, and ingests the other slides")
@pytest.mark.parametrize(
    ("complete", "victim"),
    [
        pytest.param(
            complete,
            victim,
            marks=[]
            if (complete, victim) == (2, "run")
            else pytest.mark.nightly(reason="more moments"),
        )
        for complete in range(6)
        for victim in ("run", "worker")
    ],
)
def test_kill_at_random_time(
    complete: int, victim: str, cohort: Path, whole: dict[str, Any], tmp_path: Path, run: RunCommand
) -> None:
    """The kill is some time after a number of slides is complete."""
    delay = random.Random(f"{complete} {victim}").random() * (0.05 if complete else 1.5)
    store = tmp_path / "s.lmdb"
    while not killed(cohort, store, victim, complete, delay):
        shutil.rmtree(store)
        delay *= 0.5  # the run had ended: the speed of a machine varies
    if (store / "data.mdb").exists() and (store / "data.mdb").stat().st_size:
        before = set[str]()
        with suppress(NothingToDo):  # killed before the first transaction
            before = check_store(store)
        assert len(before) >= (complete if victim == "run" else 6)
        # This checker of lmdb reads the file without the LMDB library.
        assert lmdb.verify.verify(str(store)) == []  # type: ignore[no-untyped-call]
    again = run("ingest", cohort, "--out", store, *ARGUMENTS)
    assert again.returncode == 0, again.stderr
    assert read_store(store) == whole
    with Store(store) as opened, opened._environment.read() as txn:  # and no other patches
        stored = txn.stat(opened._environment.databases[b"patches"])["entries"]
        assert stored == sum(record.planned for record in opened.complete.values())


def killed(cohort: Path, store: Path, victim: str, complete: int, delay: float) -> bool:
    """Start a run, and kill it or one of its workers after some slides; return False if it had ended before."""
    child = subprocess.Popen(
        [*COMMAND, "ingest", str(cohort), "--out", str(store), *ARGUMENTS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for _ in range(complete):
        child.stderr.readline()  # one line per slide
    time.sleep(delay)
    while True:  # workers start after the run, and end before it
        victims = [child.pid] if victim == "run" else pool_workers(child.pid)
        if victims or child.poll() is not None:
            break
    hit = False
    with suppress(IndexError, ProcessLookupError):  # the process has just ended
        os.kill(victims[0], signal.SIGKILL)
        hit = True
    _, stderr = child.communicate(timeout=120)
    if victim == "run":
        hit = child.returncode == -signal.SIGKILL
    assert child.returncode == (-signal.SIGKILL if victim == "run" and hit else 0), stderr
    return hit


def scrambled(content: bytes, seed: int) -> bytes:
    """Return the content with a few bytes changed, mostly in directories and other structures."""
    chance, changed = random.Random(seed), bytearray(content)
    structures = content.find(b"Aperio") - 2000, content.find(b"Aperio") + 2000
    for _ in range(chance.randrange(1, 40)):
        low, high = structures if chance.random() < 0.8 else (0, len(content))
        changed[chance.randrange(max(8, low), min(high, len(content)))] = chance.randrange(256)
    return bytes(changed)


@pytest.mark.nightly(
    reason="eighty corrupted or truncated slides; test_damaged_slides_fail_and_others_complete has four"
)
def test_corrupted_slides_do_not_end_run(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (made,) = make_slides(tmp_path / "made", "--size", "1000x1000")
    shutil.copy(made, folder / "whole.svs")
    for path in (made, data / "slides" / f"{CMU}.svs"):
        content = path.read_bytes()
        for seed in range(30):
            (folder / f"{path.stem}-s{seed}.svs").write_bytes(scrambled(content, seed))
        for tenth in range(10):
            part = content[: len(content) * tenth // 10]
            (folder / f"{path.stem}-{tenth}.svs").write_bytes(part)
    done = subprocess.run(
        [*COMMAND, "ingest", "in", "--json", "--slide-timeout", "30"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode in (0, 3), done.stderr
    by_slide = outcomes(done.stdout)
    assert len(by_slide) == 81
    assert by_slide["whole"]["status"] == "complete"
    assert "bug in histopipe" not in done.stderr, done.stderr
    complete = {name for name, slide in by_slide.items() if slide["status"] == "complete"}
    assert check_store(tmp_path / "patches.lmdb") == complete
    assert 5 < len(complete) < 71
