"""Slides in object storage and on web servers: the same stores as from local files, faults, and no secret anywhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer

from helpers.commands import RunCommand, messages
from helpers.faulty_server import Fault, FaultyServer, always, serving, sometimes
from helpers.stores import read_store
from histopipe.errors import RemoteError, RemoteRefused, UsageError
from histopipe.geometry import Mpp
from histopipe.inference.options import PredictOptions
from histopipe.inference.slide_run import SlideRun
from histopipe.inference.slide_tiler import source_of_files
from histopipe.predictions.sources import PredictionsFolder
from histopipe.slides.discovery import discover
from histopipe.store.store import Store
from histopipe.system import object_storage
from histopipe.system.forecast import Outlook
from histopipe.system.object_storage import download, list_files, write_file
from histopipe.system.output import Progress
from histopipe.system.urls import public_url, without_secrets
from histopipe.tiling.spec import TilingSpec

CMU = "CMU-1-Small-Region.svs"
KEY, SECRET = "AKIAHISTOPIPETEST", "wJalrXUtnFEMIhistopipeSECRETtestKEY"
FLAGS = ("--default-mpp", "0.5", "--patch-size", "240")


pytestmark = pytest.mark.usefixtures("inline_workers")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_FIRST_WAIT_SECONDS", 0.002)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Address of a server with Amazon's S3 interface."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(moto: str, real_slides: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A bucket `lab` with slides, behind a server whose answers can be broken."""
    with serving(FaultyServer(upstream=moto)) as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        object_storage._filesystem_of.cache_clear()
        # Without checksums by the client, as older tools upload: only the ETag shows a wrong byte.
        config = Config(request_checksum_calculation="when_required")
        client = boto3.client("s3", endpoint_url=moto, config=config)
        client.create_bucket(Bucket="lab")
        for path in sorted((real_slides / "slides").rglob("*.*")):
            client.upload_file(str(path), "lab", path.relative_to(real_slides).as_posix())
        server.requests.clear()
        yield server
        for item in client.list_objects_v2(Bucket="lab")["Contents"]:
            client.delete_object(Bucket="lab", Key=item["Key"])
        client.delete_bucket(Bucket="lab")
        object_storage._filesystem_of.cache_clear()


@pytest.fixture
def web(real_slides: Path) -> Iterator[FaultyServer]:
    """A web server with the slides."""
    with serving(FaultyServer(folder=real_slides / "slides")) as server:
        yield server


def contents(store: Path) -> dict[str, Any]:
    """Return the contents of a store by slide id, without the numbers, places and times of its slides."""
    of_source = {"path", "resolved_path", "mtime_ns", "etag"}
    return {
        name: ({k: v for k, v in record.items() if k not in of_source}, *values)
        for name, (_, record, *values) in read_store(store).items()
    }


def test_store_from_s3_equals_the_store_from_files(
    real_slides: Path, s3: FaultyServer, run: RunCommand, tmp_path: Path
) -> None:
    """A DICOM series is one slide, as in a folder."""
    s3.fault = sometimes(1, "cut", "slow", 500, 503)
    remote = run("ingest", "s3://lab/slides/", "--out", "remote.lmdb", "--stage", "stage", *FLAGS)
    assert remote.returncode == 3, remote.stderr
    plain = contents(real_slides / "plain.lmdb")
    assert contents(tmp_path / "remote.lmdb") == plain
    with Store(tmp_path / "remote.lmdb") as store:
        record = store.complete[0]
        assert record.path == record.resolved_path == f"s3://lab/slides/{CMU}"
        assert record.mtime_ns > 0 and record.etag
        assert len(store.slides) == len(list((real_slides / "slides").rglob("*.*")))
    assert not list((tmp_path / "stage").iterdir())
    s3.fault, before = always(None), len(s3.requests)
    assert "skipped" in run("ingest", "s3://lab/slides/", "--out", "remote.lmdb", *FLAGS).stdout
    assert len(s3.requests) - before < 10  # complete slides are listed, not downloaded
    slides, local = discover(["s3://lab/slides"]), discover([real_slides / "slides"])
    assert [(s.id, len(s.files), s.subfolder) for s in slides] == [
        (s.id, len(s.files), s.subfolder) for s in local
    ]


def test_store_from_the_web_and_a_list_equals_the_store_from_files(
    real_slides: Path, web: FaultyServer, run: RunCommand, tmp_path: Path
) -> None:
    """A list may have URLs and names of slides in a folder."""
    web.fault = sometimes(2, "cut", "slow", 500, "short", "whole")
    rows = [f"{web.url}/{CMU}?X-Amz-Signature=abc", "boxes"]
    (tmp_path / "list.csv").write_text("slide\n" + "\n".join(rows) + "\n")
    shutil.copytree(real_slides / "slides", tmp_path / "slides")
    (tmp_path / "slides" / CMU).unlink()
    assert (
        run(
            "ingest", "slides", "--slide-list", "list.csv", "--out", "remote.lmdb", *FLAGS
        ).returncode
        == 0
    )
    plain = contents(real_slides / "plain.lmdb")
    assert contents(tmp_path / "remote.lmdb") == {
        name: plain[name] for name in (CMU.removesuffix(".svs"), "boxes")
    }


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (403, 2, "403 Forbidden"),
        (404, 2, "404 Not Found"),
        (500, 6, "500 Internal Server Error (tried 6 times)"),
    ],
)
def test_refused_url_ends_the_command(
    web: FaultyServer, run: RunCommand, tmp_path: Path, fault: int, code: int, words: str
) -> None:
    web.fault = always(fault)
    done = run("ingest", f"{web.url}/{CMU}?token=verysecret", "--out", "s.lmdb")
    assert done.returncode == code
    assert words in done.stderr
    assert "verysecret" not in done.stdout + done.stderr
    assert not (tmp_path / "s.lmdb").exists()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flip", "has another checksum"),
        *(
            pytest.param(fault, words, marks=pytest.mark.nightly(reason="other answers"))
            for fault, words in (
                (403, "403 Forbidden"),
                (404, "404 Not Found"),
                (500, "tried 6 times"),
                ("cut", "tried 6 times"),
            )
        ),
    ],
)
def test_slide_that_cannot_be_downloaded_fails_alone(
    s3: FaultyServer,
    run: RunCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str | int,
    words: str,
) -> None:
    s3.fault = lambda method, path: fault if method == "GET" and path.endswith(CMU) else None
    urls = ["s3://lab/slides/boxes.tiff", f"s3://lab/slides/{CMU}"]
    assert words in messages(run("ingest", *urls, "--out", "s.lmdb", "--stage", "stage", *FLAGS), 3)
    with Store(tmp_path / "s.lmdb") as store:
        assert [record.id for record in store.complete.values()] == ["boxes"]
    assert not list((tmp_path / "stage").iterdir())
    s3.fault = always(None)
    # The next ingest tries again.
    assert run("ingest", *urls, "--out", "s.lmdb", *FLAGS).returncode == 0


def test_downloads_that_differ_from_the_listed_file_fail(
    real_slides: Path, web: FaultyServer, tmp_path: Path
) -> None:
    shutil.copy(real_slides / "slides" / CMU, tmp_path / CMU)
    (file,) = list_files(f"{web.url}/{CMU}?secret=1")
    assert "secret" not in repr(file)
    web.fault = always(403)
    with pytest.raises(RemoteRefused, match=f"{CMU} cannot be read: found 403 Forbidden"):
        download(file, tmp_path / "refused")
    web.fault = always("short")
    with pytest.raises(RemoteError, match="bytes received"):
        download(file, tmp_path / "short")
    web.fault, web.folder = always(None), tmp_path
    (tmp_path / CMU).write_bytes((tmp_path / CMU).read_bytes()[:-1] + b"x")
    with pytest.raises(RemoteError, match="changed while it was being downloaded"):
        download(file, tmp_path / "out")


def test_server_without_ranges_or_with_get_only(
    real_slides: Path, web: FaultyServer, tmp_path: Path
) -> None:
    signed: Fault = lambda method, _: 403 if method == "HEAD" else None  # noqa: E731 - for GET only
    for out, fault in ((tmp_path / "whole", always("whole")), (tmp_path / "signed", signed)):
        web.fault = fault
        (file,) = list_files(f"{web.url}/{CMU}")
        download(file, out)
        assert out.read_bytes() == (real_slides / "slides" / CMU).read_bytes()


def test_large_file_is_downloaded_in_parts(
    web: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_storage, "PART_BYTES", 100_000)
    (file,) = list_files(f"{web.url}/{CMU}")
    web.requests.clear()
    sizes, web.fault = list[int](), sometimes(3, "cut", share=0.3)
    download(file, tmp_path / "out", advance=sizes.append)
    assert sum(sizes) == file.size_bytes
    assert len(sizes) == -(-file.size_bytes // 100_000)
    got = sum(method == "GET" for method, _ in web.requests)
    assert len(sizes) < got < 2 * len(sizes)  # only the broken parts were requested again


def test_file_is_written_despite_faults(s3: FaultyServer, tmp_path: Path) -> None:
    s3.fault = sometimes(2, "cut", 500, 503)
    (tmp_path / "shard").write_bytes(bytes(range(256)) * 400)
    for number in range(5):
        write_file(f"s3://lab/slides/{number}", tmp_path / "shard")
        download(list_files(f"s3://lab/slides/{number}")[0], tmp_path / f"{number}")
        assert (tmp_path / f"{number}").read_bytes() == (tmp_path / "shard").read_bytes()
    s3.fault = lambda method, _: "short" if method == "HEAD" else None
    with pytest.raises(RemoteError, match=r"cannot be written.*differs from what was sent"):
        write_file("s3://lab/slides/5", tmp_path / "shard")


def test_server_that_is_down_is_tried_again(run: RunCommand) -> None:
    printed = messages(run("ingest", "http://127.0.0.1:9/a.svs?key=verysecret"), 6)
    assert re.search(r"Cannot connect.*tried 6 times", printed)
    assert "verysecret" not in printed


def test_unknown_url_and_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nosuch:// is an unknown kind of URL"):
        list_files("nosuch://bucket/a")
    object_storage._filesystem_of.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "aiohttp", None)
    with pytest.raises(UsageError, match=r"histopipe\[remote\]"):
        list_files("https://localhost/a.svs")
    object_storage._filesystem_of.cache_clear()


def test_level_needs_scales_before_the_download(web: FaultyServer, run: RunCommand) -> None:
    assert "--allow-mixed-mpp" in messages(run("ingest", f"{web.url}/{CMU}", "--level", "0"), 2)
    assert run("ingest", f"{web.url}/{CMU}", "--level", "0", "--allow-mixed-mpp").returncode == 0


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://me:pass@host/a b.svs?sig=1#x", "https://host/a b.svs"),
        ("s3://bucket/a#1?.svs", "s3://bucket/a#1?.svs"),
        ("s3://bucket/a.svs?versionId=1", "s3://bucket/a.svs"),
        ("s3://key:secret@bucket/a.svs", "s3://bucket/a.svs"),
        ("az://container@account/a.svs", "az://container@account/a.svs"),
    ],
)
def test_public_url(url: str, public: str) -> None:
    assert public_url(url) == public


def test_text_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "very/secret/key==")
    text = "GET 'https://u:p@h/a?sig=1' failed with very/secret/key=="
    assert without_secrets(text) == "GET 'https://h/a' failed with ***"


def test_no_secret_is_written_or_shown(
    s3: FaultyServer, web: FaultyServer, run: RunCommand, tmp_path: Path
) -> None:
    """Signed URLs and credentials, in a run with failures of each kind, in all files and all output."""
    signed = "X-Amz-Credential=SIGNEDCREDENTIAL&X-Amz-Signature=SIGNEDSIGNATURE"
    broken: dict[str, str | int] = {"/boxes.tiff": 500, "/small.svs": "cut"}
    web.fault = lambda method, path: broken.get(path) if method == "GET" else None
    s3.fault = lambda method, path: 403 if method == "GET" and "/j2k/" in path else None
    host = urlsplit(web.url).netloc
    urls = [
        "s3://lab/slides/dicom/",
        f"http://user:PASSWORD@{host}/{CMU}?{signed}",
        f"{web.url}/boxes.tiff?{signed}",
        f"{web.url}/small.svs?{signed}",
    ]
    (tmp_path / "list.csv").write_text("slide\n" + "\n".join(urls) + "\n")
    out = tmp_path / "out"
    out.mkdir()
    listed = ("--slide-list", tmp_path / "list.csv", "--out", out / "s.lmdb", *FLAGS)
    done = [run("ingest", *listed, "--json"), run("ingest", *listed, "--plan")]
    assert done[0].returncode == 3
    web.fault = always(403)
    done += [run("info", out / "s.lmdb", "--json"), run("ingest", urls[1], "--out", out / "t.lmdb")]
    assert "403 Forbidden" in done[-1].stderr
    secrets = re.compile(
        "SIGNEDCREDENTIAL|SIGNEDSIGNATURE|PASSWORD|" + KEY + "|" + re.escape(SECRET)
    )
    for ended in done:
        assert not secrets.search(ended.stdout + ended.stderr)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) >= 3
    for path in files:
        assert not secrets.search(path.read_bytes().decode("latin-1")), path


def test_predict_reads_slides_at_urls_and_removes_their_copies(
    real_slides: Path, web: FaultyServer, tmp_path: Path
) -> None:
    spec = TilingSpec(patch_size=240, mpp=Mpp(0.5), tissue="otsu-2")
    model: Any = SimpleNamespace(spec=spec.to_json(), stain_norm="none", patch_mpp=None)
    paths = [real_slides / "slides" / name for name in (CMU, "boxes.tiff")]
    images = []
    for sources, stage_bytes in (
        (paths, 50e9),
        ([f"{web.url}/{path.name}" for path in paths], paths[0].stat().st_size + 10),  # one by one
    ):
        options = PredictOptions(
            batch_size=7,
            default_mpp=Mpp(0.5),
            workers=1,
            stage_gb=stage_bytes / 1e9,
            stage=tmp_path / "stage" if sources is not paths else None,
        )
        slides = SlideRun(cast(Any, None), "predicting", 2, Progress(), tmp_path, Outlook({}))
        batches = []
        with source_of_files(sources, model, options, Progress()) as files:
            for slide in files.slides(slides, PredictionsFolder(tmp_path / "out").complete):
                if slide is not None:
                    batches += [slide.load(step).images.tobytes() for step in range(slide.steps)]
                    assert slide.predicted().patches == slide.rows
                    slide.close()
        assert not slides.failed
        images.append(batches)
    assert images[0] == images[1] and len(images[0]) > 5
    assert not list((tmp_path / "stage").iterdir())
