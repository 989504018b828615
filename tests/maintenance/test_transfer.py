"""`push` and `pull`: the same store after kills, wrong bytes and cut connections, in parts that are sent once."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from helpers.commands import COMMAND, Run, small_disk
from helpers.faulty_server import FaultyServer, always, serving, sometimes
from helpers.inline import in_process
from helpers.paths import GOLDEN
from helpers.stores import read_store
from histopipe.errors import DamagedStore, MachineShort, NothingToDo, UsageError
from histopipe.maintenance.transfer import MANIFEST, pull, push, read_manifest
from histopipe.maintenance.verify import verify
from histopipe.store.store import Store
from histopipe.system import object_storage
from histopipe.system.output import Progress

QUIET = Progress()
pytestmark = pytest.mark.usefixtures("shared_verifiers")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs commands in this process."""
    return in_process(tmp_path, monkeypatch, capsys)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """An empty bucket `lab`, behind a server whose answers can be broken."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    upstream = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAHISTOPIPETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(object_storage, "_FIRST_WAIT_SECONDS", 0.002)
    boto3.client("s3", endpoint_url=upstream).create_bucket(Bucket="lab")
    with serving(FaultyServer(upstream=upstream)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        object_storage._filesystem_of.cache_clear()
        yield server
    object_storage._filesystem_of.cache_clear()
    moto.stop()


def test_pulled_store_is_the_pushed_store_despite_faults(
    s3: FaultyServer, golden: Path, tmp_path: Path
) -> None:
    s3.fault = sometimes(4, "cut", 500, 503, "slow")
    url = "s3://lab/stores/golden"
    first = push(golden, url, block_mb=0.01, progress=QUIET)
    assert first.sent_bytes == first.size_bytes > 10_000
    done = pull(url, tmp_path / "pulled", progress=QUIET)
    assert done.exit_code == 0
    assert done.received_bytes == first.size_bytes
    assert (tmp_path / "pulled" / "data.mdb").read_bytes() == (golden / "data.mdb").read_bytes()
    assert read_store(tmp_path / "pulled") == read_store(golden)
    assert not verify(tmp_path / "pulled", full=True, progress=QUIET).findings


def test_second_push_sends_only_what_has_changed(
    s3: FaultyServer, data: Path, run: Run, tmp_path: Path
) -> None:
    slides, url = data / "slides", "s3://lab/patches.lmdb"
    assert run("ingest", slides / "CMU-1-Small-Region.svs").returncode == 0
    store = tmp_path / "patches.lmdb"
    first = push(store, url, block_mb=0.05, progress=QUIET)
    again = push(store, url, block_mb=0.05, progress=QUIET)
    assert again.sent_bytes == 0
    run("ingest", slides / "TCGA-CR-7395-01A-01-TS1.svs", "--default-mpp", "0.5")
    changed = push(store, url, block_mb=0.05, progress=QUIET)
    assert 0 < changed.sent_bytes < changed.size_bytes
    assert changed.size_bytes > first.size_bytes
    manifest = read_manifest(url)
    there = {entry.url.rpartition("/")[2] for entry in object_storage.list_files(f"{url}/blocks/")}
    assert there == manifest.blocks.keys()  # blocks of the earlier version are removed
    assert pull(url, tmp_path / "pulled", progress=QUIET).exit_code == 0
    assert read_store(tmp_path / "pulled") == read_store(store)


@pytest.mark.nightly(
    reason="kills six commands; test_full_disk_ends_the_pull_and_it_continues shows the same state"
)
def test_killed_push_and_pull_continue(
    s3: FaultyServer, data: Path, run: Run, tmp_path: Path
) -> None:
    assert run("ingest", data / "slides" / "CMU-1-Small-Region.svs").returncode == 0
    store, url = tmp_path / "patches.lmdb", "s3://lab/killed.lmdb"
    s3.fault = always("slow")
    numbers = random.Random(3)
    for command, target in (
        (["push", store, url, "--block-mb", "0.005"], None),
        (["pull", url, tmp_path / "pulled"], tmp_path / "pulled"),
    ):
        for _ in range(3):
            process = subprocess.Popen(
                [*COMMAND, *map(str, command)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            before = len(s3.requests)
            while (
                len(s3.requests) < before + 10 + numbers.randint(0, 10) and process.poll() is None
            ):
                time.sleep(0.005)
            ended = process.poll() is not None
            process.send_signal(signal.SIGKILL)
            _, errors = process.communicate()
            assert not ended, errors
            assert target is None or not target.exists()
        s3.fault = always(None)
        if target is None:
            pushed = push(store, url, block_mb=0.005, progress=QUIET)
            assert 0 < pushed.sent_bytes < pushed.size_bytes
            s3.fault = always("slow")
        else:
            pulled = pull(url, target, progress=QUIET)
            assert 0 < pulled.received_bytes < pulled.size_bytes
            assert read_store(target) == read_store(store)
    assert not list(tmp_path.glob(".part-*"))


def test_flipped_byte_in_a_block_is_found(tmp_path: Path, golden: Path) -> None:
    url = f"file://{tmp_path}/remote/store"
    push(golden, url, block_mb=0.01, progress=QUIET)
    block = sorted((tmp_path / "remote" / "store" / "blocks").iterdir())[3]
    damaged = bytearray(block.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    block.write_bytes(damaged)
    with pytest.raises(DamagedStore, match=f"{block.name} does not match its checksum"):
        pull(url, tmp_path / "pulled", progress=QUIET)
    assert not (tmp_path / "pulled").exists()
    # A push does not trust a block for its name alone if its size differs; otherwise the pull has found it.
    block.write_bytes(b"short")
    push(golden, url, block_mb=0.01, progress=QUIET)
    assert pull(url, tmp_path / "pulled", progress=QUIET).exit_code == 0


def test_missing_block_is_found(tmp_path: Path, golden: Path) -> None:
    url = f"file://{tmp_path}/remote"
    push(golden, url, block_mb=0.01, progress=QUIET)
    next((tmp_path / "remote" / "blocks").iterdir()).unlink()
    with pytest.raises(Exception, match="no such file"):
        pull(url, tmp_path / "pulled", progress=QUIET)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"files": []},
        {"block_bytes": 0},
        {"block_bytes": 10**12},
        {"files": [{"name": "../x", "size_bytes": 0, "blocks": []}]},
        {"files": [{"name": "/etc/x", "size_bytes": 0, "blocks": []}]},
        {"files": [{"name": "a", "size_bytes": 5, "blocks": []}]},
        {"files": [{"name": "a", "size_bytes": 5, "blocks": ["../../x"]}]},
        {"files": [{"name": "a", "size_bytes": -5, "blocks": []}]},
        {"files": 3},
        {"uuid": None, "files": None},
    ],
)
def test_wrong_manifest_is_refused(tmp_path: Path, golden: Path, change: dict[str, object]) -> None:
    url, path = f"file://{tmp_path}/remote", tmp_path / "remote" / MANIFEST
    push(golden, url, progress=QUIET)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DamagedStore):
        pull(url, tmp_path / "pulled", progress=QUIET)
    assert not (tmp_path / "pulled").exists()
    path.write_text("{")
    with pytest.raises(DamagedStore, match="is damaged"):
        pull(url, tmp_path / "pulled", progress=QUIET)


def test_other_store_and_wrong_targets_are_refused(
    tmp_path: Path, golden: Path, data: Path, run: Run
) -> None:
    url = f"file://{tmp_path}/remote"
    push(golden, url, progress=QUIET)
    assert run("ingest", data / "slides" / "CMU-1-Small-Region.svs").returncode == 0
    with pytest.raises(UsageError, match="holds another store"):
        push(tmp_path / "patches.lmdb", url, progress=QUIET)
    with pytest.raises(UsageError, match="is no URL"):
        push(golden, "remote", progress=QUIET)
    with pytest.raises(UsageError, match="web server"):
        push(golden, "https://localhost/store", progress=QUIET)
    with pytest.raises(NothingToDo, match="no store"):
        push(tmp_path / "none", url, progress=QUIET)
    with pytest.raises(NothingToDo, match="no store"):
        pull(f"file://{tmp_path}/none", tmp_path / "pulled", progress=QUIET)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot create or write to"):
        pull(url, tmp_path / "file" / "pulled", progress=QUIET)
    with pytest.raises(UsageError, match="exists"):
        pull(url, golden, progress=QUIET)


def test_store_that_is_written_during_the_push_is_refused(
    tmp_path: Path, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = object_storage.write_file

    def then_touch(url: str, content: bytes) -> object:
        (golden / "data.mdb").touch()
        return write(url, content)

    monkeypatch.setattr("histopipe.maintenance.transfer.write_file", then_touch)
    with pytest.raises(UsageError, match="was written during the transfer"):
        push(golden, f"file://{tmp_path}/remote", progress=QUIET)
    with pytest.raises(NothingToDo):
        pull(f"file://{tmp_path}/remote", tmp_path / "pulled", progress=QUIET)


def test_full_disk_ends_the_pull_and_it_continues(tmp_path: Path, golden: Path) -> None:
    url = f"file://{tmp_path}/remote"
    size = push(golden, url, block_mb=0.01, progress=QUIET).size_bytes
    with small_disk(tmp_path / "disk", f"{size + 1_000_000}") as disk:
        (disk / "filler").write_bytes(bytes(1_050_000))
        with pytest.raises(MachineShort, match="is full"):
            pull(url, disk / "pulled", progress=QUIET)
        (disk / "filler").unlink()
        pull(url, disk / "pulled", progress=QUIET)
        shutil.copytree(disk / "pulled", tmp_path / "copy")
    assert read_store(tmp_path / "copy") == read_store(golden)


def test_damage_that_was_pushed_is_reported(tmp_path: Path, run: Run) -> None:
    shutil.copytree(GOLDEN / "store-v1", tmp_path / "store")
    with Store(tmp_path / "store") as store:
        number = next(iter(store.complete))
        patch = bytes(store.value(number, 0))
    content = bytearray((tmp_path / "store" / "data.mdb").read_bytes())
    while (place := content.find(patch[-200:])) >= 0:  # free pages may hold an older copy
        content[place + 100] ^= 255
    (tmp_path / "store" / "data.mdb").write_bytes(content)
    assert run("push", "store", f"file://{tmp_path}/remote", "--json").returncode == 0
    done = run("pull", f"file://{tmp_path}/remote", "pulled", "--json")
    assert done.returncode == 5
    assert "finding" in done.stdout
