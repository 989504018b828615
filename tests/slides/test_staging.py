"""Copies of slides on a local disk: their files, their size together, kills, full disks, and stores made from them."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import COMMAND, RunCommand, small_disk
from helpers.slides import make_slides
from helpers.stores import read_store
from histopipe.errors import MachineShort, OptionUnfit, SlideUnreadable, UsageError
from histopipe.ingestion.slide_job import SlideJob
from histopipe.slides import staging
from histopipe.slides.discovery import discover
from histopipe.slides.slide_files import SlideFile, fingerprint
from histopipe.slides.staging import StagingArea, staged
from histopipe.store.store import Store
from histopipe.system.locks import locked

pytestmark = pytest.mark.usefixtures("inline_workers")


def write_files(folder: Path, sizes: dict[str, int]) -> list[SlideFile]:
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.random.default_rng(size).bytes(size))
    return discover([folder])


def bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):  # files may vanish at any time
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(root, name).stat().st_size
    return total


def copies(
    stage: StagingArea, slides: list[SlideFile], held: list[SlideFile]
) -> Iterator[tuple[SlideFile, SlideFile]]:
    """Yield slides with their copies, which are checked. Release the held copies whenever the stage needs their space."""
    for item in staged(stage, slides, lambda slide: slide):
        if item is None:
            while held:
                stage.release(held.pop().path.parent)
            continue
        slide, copy = item
        assert isinstance(copy, SlideFile)
        for original, local in zip(slide.files, copy.files, strict=True):
            assert local.read_bytes() == original.read_bytes()
        held.append(copy)
        yield slide, copy


def test_all_files_of_a_slide_are_copied_with_their_folders(tmp_path: Path) -> None:
    sizes = {"a/m.mrxs": 10, "a/m/Slidedat.ini": 20, "a/m/Data0000.dat": 40_000_000}
    slides = write_files(tmp_path / "slides", sizes | {"b.svs": 0, "a/other.dat": 5})
    with StagingArea(tmp_path / "stage", 10**9) as stage:
        for slide, copy in copies(stage, slides, []):
            assert (copy.id, copy.path.name) == (slide.id, slide.path.name)
            names = [path.relative_to(slide.path.parent) for path in slide.files]
            assert [path.relative_to(copy.path.parent) for path in copy.files] == names
    assert not list((tmp_path / "stage").iterdir())


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.nightly(reason="more sizes") if seed else [])
        for seed in range(6)
    ],
)
def test_copies_never_exceed_the_limit_and_keep_their_order(tmp_path: Path, seed: int) -> None:
    numbers, limit = random.Random(seed), 100_000
    slides = write_files(
        tmp_path / "slides", {f"{i:02}.svs": numbers.randint(1, limit) for i in range(25)}
    )
    sizes, seen, held = list[int](), list[SlideFile](), list[SlideFile]()

    def measure(_: int) -> None:
        sizes.append(bytes_in(tmp_path / "stage"))

    with StagingArea(tmp_path / "stage", limit, advance=measure) as stage:
        for slide, _ in copies(stage, slides, held):
            seen.append(slide)
            if numbers.random() < 0.5:
                stage.release(held.pop(0).path.parent)
    assert seen == slides
    assert limit / 2 < max(sizes) <= limit


def test_slide_above_the_limit_and_missing_slide_fail_alone(tmp_path: Path) -> None:
    slides = write_files(tmp_path / "slides", {"a.svs": 2000, "b.svs": 10, "c.svs": 500})
    slides[1].path.unlink()
    with StagingArea(tmp_path / "stage", 1000) as stage:
        outcomes = [item[1] for item in filter(None, staged(stage, slides, lambda slide: slide))]
    assert [type(outcome) for outcome in outcomes] == [OptionUnfit, SlideUnreadable, SlideFile]
    assert "--stage-gb" in str(outcomes[0])


def test_slide_that_changes_during_its_copy_fails(tmp_path: Path) -> None:
    (slide,) = write_files(tmp_path / "slides", {"a.svs": 100_000})

    def touch(_: int) -> None:
        os.utime(slide.path, ns=(1, 1))

    with StagingArea(tmp_path / "stage", 10**6, advance=touch) as stage:
        ((_, outcome),) = filter(None, staged(stage, [slide], lambda slide: slide))
        assert isinstance(outcome, SlideUnreadable)
        assert "changed while it was being copied" in str(outcome)
        assert bytes_in(tmp_path / "stage") == 0


def test_leftovers_of_killed_runs_only_are_removed(tmp_path: Path) -> None:
    for name in ("histopipe-stage-dead", "histopipe-stage-alive", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / "histopipe-stage-link").symlink_to(tmp_path / "data")
    with locked(tmp_path / "histopipe-stage-alive") as mine:
        assert mine
        with StagingArea(tmp_path, 1000):
            left = {path.parent.name for path in tmp_path.glob("*/file")}
    assert left == {"histopipe-stage-alive", "data", "histopipe-stage-link"}
    assert {entry.name for entry in tmp_path.iterdir()} == left


def test_full_disk_makes_the_window_smaller_or_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the free space is enough when it is checked, and used by another process afterwards."""
    monkeypatch.setattr(staging, "_SPARE_BYTES", 1 << 16)
    slides = write_files(tmp_path / "slides", {f"{i}.svs": 3 << 20 for i in range(4)})
    with small_disk(tmp_path / "disk", "8M") as disk:
        with StagingArea(disk, 10**9) as stage:
            assert [slide for slide, _ in copies(stage, slides, [])] == slides
        with monkeypatch.context() as patch, StagingArea(disk, 10**9) as stage:
            patch.setattr(staging, "free_bytes", lambda _: 10**9)
            assert [slide for slide, _ in copies(stage, slides, [])] == slides
        (disk / "filler").write_bytes(bytes(6 << 20))
        with StagingArea(disk, 10**9) as stage, pytest.raises(MachineShort, match="too full"):
            list(staged(stage, slides, lambda slide: slide))
        assert [entry.name for entry in disk.iterdir()] == ["filler"]


def test_network_filesystem_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "network_filesystem", lambda _: "nfs4")
    with pytest.raises(UsageError, match="network filesystem"):
        StagingArea(tmp_path / "stage", 1000)
    assert not (tmp_path / "stage").exists()


def test_staged_store_equals_the_store_made_in_place(
    real_slides: Path, run: RunCommand, tmp_path: Path
) -> None:
    slides, plain = real_slides / "slides", real_slides / "plain.lmdb"
    flags = ("--default-mpp", "0.5", "--patch-size", "240", "--out", "staged.lmdb")
    assert run("ingest", slides, "--stage", "stage", "--stage-gb", "0.003", *flags).returncode == 3
    assert read_store(tmp_path / "staged.lmdb") == read_store(plain)
    with Store(plain) as store, Store(tmp_path / "staged.lmdb") as copied:
        records = [record.to_json() for record in store.slides]
        assert [record.to_json() for record in copied.slides] == records
        assert any(record.error for record in copied.slides)
    assert not list((tmp_path / "stage").iterdir())
    assert "skipped" in run("ingest", slides, *flags).stdout  # a resume needs no staging


def test_plan_stages_too_and_leaves_nothing(
    real_slides: Path, run: RunCommand, tmp_path: Path
) -> None:
    command = ("ingest", real_slides / "slides", "--plan", "--default-mpp", "0.5", "--json")
    plain, staged = (
        [slide | {"seconds": 0} for slide in json.loads(run(*words).stdout)["slides"]]
        for words in (command, (*command, "--stage", "stage"))
    )
    assert staged == plain
    assert not list((tmp_path / "stage").iterdir())


@pytest.mark.nightly(
    reason="kills twenty commands; test_leftovers_of_killed_runs_only_are_removed shows the same state"
)
def test_twenty_kills_lose_nothing_and_leave_nothing(tmp_path: Path, run: RunCommand) -> None:
    """Kill at random moments after the command began to stage."""
    folder, stage, numbers = tmp_path / "slides", tmp_path / "stage", random.Random(5)
    make_slides(folder, "--count", "6")
    arguments = ["ingest", folder, "--stage", stage, "--workers", "1", "--patch-size", "64"]
    for _ in range(20):
        before = set(stage.glob("*"))
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while before == set(stage.glob("*")) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(numbers.uniform(0.0, 0.3))
        process.kill()
        process.wait()
        # Otherwise only the first run stages.
        shutil.rmtree(tmp_path / "patches.lmdb", ignore_errors=True)
    assert bytes_in(stage) > 0
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert not list(stage.iterdir())
    with Store(tmp_path / "patches.lmdb") as store:
        assert len(store.complete) == 6


def test_messages_name_the_original(tmp_path: Path) -> None:
    (slide,) = write_files(tmp_path / "slides", {"a/b.svs": 10})
    copy = replace(slide, path=Path("/stage/x/000000/b.svs"), original=fingerprint(slide))
    job = SlideJob(slide, staged=copy)
    assert job.with_original_paths("/stage/x/000000/b.svs is bad") == f"{slide.path} is bad"
