"""`ingest --plan`, the summary table, ingest.csv, the log, and refused network filesystems."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.commands import RunCommand, messages
from helpers.slides import CMU, TCGA, make_slides
from helpers.stores import outcomes, read_store
from helpers.trainings import csv_rows
from histopipe.errors import UsageError
from histopipe.ingestion import ingest_slides
from histopipe.ingestion.ingest_report import IngestReport, SlideOutcome, SlideStatus
from histopipe.ingestion.options import IngestOptions
from histopipe.store.store import Store
from histopipe.system.files import network_filesystem
from histopipe.tiling.spec import TilingSpec

pytestmark = pytest.mark.usefixtures("inline_workers")


def test_plan_writes_nothing_and_matches_ingest(
    run: RunCommand, data: Path, tmp_path: Path
) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "2000x2000")
    shutil.copy(path, path.with_name("twin.svs"))
    for real in (data / "slides" / f"{CMU}.svs", data / "bad" / "broken.svs"):
        shutil.copy(real, tmp_path / "in")
    before = sorted(tmp_path.rglob("*"))
    done = run("ingest", "in", "--plan", "--json")
    assert done.returncode == 3
    assert sorted(tmp_path.rglob("*")) == before
    preview, slides = json.loads(done.stdout), outcomes(done.stdout)
    assert "has no slide format that OpenSlide supports" in slides["broken"]["reason"]
    copies = "slide-000, twin are copies of one slide: all are stored, and stay in the same subset of a split"
    assert preview["warnings"] == [copies]
    ingested = run("ingest", "in")
    assert ingested.returncode == 3 and copies in ingested.stderr
    with Store(tmp_path / "patches.lmdb") as store:
        for number, record in store.complete.items():
            planned = slides[record.id]
            for name in ("level", "read_size", "resampling", "route", "route_reason", "planned"):
                assert planned[name] == getattr(record, name)
            stored = -(-store.index(number)["length"].astype(int) // 4096).sum() * 4096
            # For copied tiles, the estimate is the sum of their sizes. Otherwise it is based on eight patches.
            tolerance = 0.02 if record.route == "copy" else 0.15
            assert planned["stored_bytes"] == pytest.approx(stored, rel=tolerance)
        total = sum(slide["stored_bytes"] for slide in slides.values())
        assert total == preview["stored_bytes"] < preview["free_bytes"]
    again = run("ingest", "in", "--plan").stdout
    assert f"{CMU:<40} skipped" in again and "patches.lmdb: 0 patches" in again
    assert "patch_size: 256 in the store, 128 asked for" in messages(
        run("ingest", "in", "--plan", "--patch-size", 128), 2
    )


def test_plan_names_common_cause_once(run: RunCommand, tmp_path: Path) -> None:
    (path,) = make_slides(tmp_path / "in", "--size", "300x300", "--mpp", "0.62")
    for number in (1, 2):
        shutil.copy(path, path.with_name(f"slide-00{number}.svs"))
    done = run("ingest", "in", "--plan")
    assert done.returncode == 4
    assert done.stdout.splitlines()[1] == (
        "3 slides: slide-000: slide-000 is too coarse: found 0.62 mpp at its finest, expected at most 0.5; "
        "leave it out, or use a larger --mpp, such as 0.62 (patches are never enlarged). "
        "Also slide-001, slide-002"
    )


def test_summary_names_slides_without_patches() -> None:
    empty = SlideOutcome(
        "a", "", SlideStatus.COMPLETE, notes=("no mpp", "no tissue found; dark: try x")
    )
    slides = [replace(empty, id=f"a{number}") for number in range(5)]
    slides += [replace(empty, id="b", notes=("no patch fits: 1×1",), status=SlideStatus.SKIPPED)]
    slides += [replace(empty, id="c", patches=3), replace(empty, id="d", unreadable=2, notes=())]
    slides += [
        SlideOutcome(name, "", SlideStatus.FAILED, reason=f"{name} is bad") for name in "efgh"
    ]
    report = IngestReport("s.lmdb", 1.0, slides)
    assert report.summary_lines()[-1] == (
        "12 slides: 1 with patches, 7 without (no tissue found: a0, a1, a2 and 2 more; no patch fits: b; "
        "no patch is stored: d), 4 failed"
    )
    assert str(report).splitlines()[-1] == "failed 4 slides: e: e is bad. Also f, g, h"
    assert IngestReport("s", 1.0, slides[6:7]).summary_lines()[-1] == "1 slide: 1 with patches"


def test_ingest_writes_table_csv_and_log(run: RunCommand, data: Path, tmp_path: Path) -> None:
    make_slides(tmp_path / "in", "--size", "1000x1000")
    for name in (CMU, TCGA):
        shutil.copy(data / "slides" / f"{name}.svs", tmp_path / "in")
    done = run("ingest", "in")
    assert done.returncode == 3
    store = tmp_path / "patches.lmdb"
    log = (store / "ingest.log").read_text()
    records = {name: values[1] for name, values in read_store(store).items()}
    table = {line[:12].strip(): line[12:].split() for line in done.stdout.splitlines()[2:7]}
    assert (table["ingested"][0], table["failed"]) == ("2", ["1"])
    for name, route in (("slide-000", "copy"), (CMU, "decode")):
        assert table[route][:2] == ["1", str(records[name]["stored"])]
        assert float(table[route][3]) == pytest.approx(
            records[name]["stored_bytes"] / 1e6, abs=0.06
        )
    assert "1 × decode: patches are 256 pixels, native tiles 240×240" in done.stdout
    rows = {row["id"]: row for row in csv_rows(store / "ingest.csv")}
    assert set(rows) == {CMU, TCGA, "slide-000"}
    assert "no usable mpp" in rows[TCGA]["reason"]
    copied = rows["slide-000"]
    assert (copied["route"], int(copied["patches"])) == ("copy", records["slide-000"]["stored"])
    assert float(copied["seconds"]) > 0
    assert "patch_size=256" in log
    assert f"failed {TCGA}: {TCGA} has no usable mpp" in log
    assert "routes    1 decode, 1 copy" in run("info", "patches.lmdb").stdout
    run("ingest", "in")
    assert (store / "ingest.log").read_text().startswith(log)


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 22 0:30 / /mnt/lab\\040data rw,relatime shared:1 - nfs4 server:/export rw
41 40 0:31 / /mnt/lab\\040data/scratch rw - xfs /dev/sdb rw
42 22 0:32 / /home rw - fuse.sshfs server: rw
43 22 0:33 / /over rw - ext4 /dev/sdc rw
44 43 0:34 / /over rw - cifs //server/share rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/s.lmdb", None),
        ("/mnt/lab data/s.lmdb", "nfs4"),
        ("/mnt/lab data/scratch/s.lmdb", None),
        ("/home/me/s.lmdb", "fuse.sshfs"),
        ("/homes/me/s.lmdb", None),
        ("/over/s.lmdb", "cifs"),
    ],
)
def test_network_filesystems_are_found_in_mounts(
    tmp_path: Path, path: str, kind: str | None
) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert network_filesystem(Path(path), tmp_path / "mountinfo") == kind


def test_store_on_network_filesystem_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_slides, "network_filesystem", lambda _: "nfs4")
    check = functools.partial(
        ingest_slides.check_ingest, [], tmp_path / "s.lmdb", TilingSpec(level=0)
    )
    with pytest.raises(UsageError, match=r"network filesystem: found nfs4.*--allow-network"):
        check(IngestOptions())
    check(IngestOptions(allow_network=True))
