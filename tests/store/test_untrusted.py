"""Tests with untrusted input: any bytes are read or refused, in limited memory, and no path in them is followed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from helpers.commands import RunCommand, run_command, succeed
from helpers.lmdb_pages import PAGE, pages_of
from helpers.paths import GOLDEN, PROGRAMS
from helpers.stores import a_store, edit_record, entry, jpegs, patched, put
from histopipe.cli.parameters import check_untrusted_input
from histopipe.errors import DamagedStore, SlideUnreadable, UsageError
from histopipe.features.feature_file import writing
from histopipe.features.feature_sets import check_features
from histopipe.ingestion.coords import check_coords
from histopipe.maintenance.checks import Examination, Finding
from histopipe.maintenance.verify import check_untrusted, verify
from histopipe.measure.quality import _measures
from histopipe.store.reading import decode, decode_picture
from histopipe.store.store import Store

pytestmark = pytest.mark.usefixtures("shared_verifiers")


@pytest.mark.nightly(reason="fuzzing")
def test_changed_files_are_read_or_refused(trained: Path, made_store: Path, tmp_path: Path) -> None:
    """Splits, settings, metrics, predictions, tables, annotations, records and pictures, with little free memory."""
    program = [sys.executable, "-P", PROGRAMS / "fuzz.py", trained, made_store, tmp_path / "run"]
    command = [*map(str, program), "--rounds", "80"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = re.findall(r"^\S+: (\d+) of \d+ refused$", done.stdout, re.MULTILINE)
    assert len(refused) == 20
    assert all(int(count) > 3 for count in refused), done.stdout


def test_untrusted_store_is_verified_first(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before TensorFlow is loaded, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    for command in ("info", "report"):
        succeed(command, small_store, "--untrusted", *(["--out", "r.html"] * (command == "report")))
    shutil.copytree(small_store, "patches.lmdb")  # the default store
    patched(Path("patches.lmdb/data.mdb"), PAGE * pages_of(small_store).leaves["patches"][0] + 2)
    Path("saved").mkdir()
    Path("saved/saved_model.pb").touch()
    for code, message, words in (
        (5, "patches.lmdb failed verification", ("info", "patches.lmdb")),
        (5, "patches.lmdb failed verification", ("train", "patches.lmdb", "--out", "new")),
        (5, "patches.lmdb failed verification", ("merge", "patches.lmdb", "--out", "new")),
        (5, "patches.lmdb failed verification", ("embed", "--model", "resnet50", "--out", "new")),
        (
            2,
            "can run any code",
            ("embed", small_store, "--model", "a", *SAVED, "--out", "f-{model}"),
        ),
    ):
        done = run_command(*words, "--untrusted")
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert not Path("new").exists()


SAVED = ("--model", "b", "--weights", "b=saved")


def test_lock_file_that_is_link_is_not_written(
    small_store: Path, tmp_path: Path, run: RunCommand
) -> None:
    store = Path(shutil.copytree(small_store, tmp_path / "s.lmdb"))
    (tmp_path / "thesis.txt").write_text("chapter 1")
    (store / "lock.mdb").unlink(missing_ok=True)
    (store / "lock.mdb").symlink_to(tmp_path / "thesis.txt")
    for command in (
        ("info", store),
        ("info", store, "--untrusted"),
        ("verify", store),
        ("verify", store, "--untrusted"),
        ("remove", store, "slide-000"),
        ("remove", store, "--compact"),
        ("quality", store),
    ):
        done = run(*command)
        assert (done.returncode, "link" in done.stdout + done.stderr) == (5, True), command
    assert (tmp_path / "thesis.txt").read_text() == "chapter 1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spec", {"mpp": "x"}),
        ("spec", {"mpp": -1}),
        ("spec", {"overlap": -5}),
        ("spec", {"codec": [1]}),
        ("spec", {"tissue": {}}),
        ("spec", {"tissue": "\x1b]0;owned\x07"}),
        ("spec", {"tissue_threshold": True}),
        ("created", "\x1b[2J"),
        ("classes", ["\x1b[2J"]),
    ],
)
def test_settings_of_store_are_checked(
    small_store: Path, tmp_path: Path, run: RunCommand, name: str, value: Any
) -> None:
    store = Path(shutil.copytree(small_store, tmp_path / "s.lmdb"))
    before = json.loads(entry(store, "meta", name.encode()))
    after = {**before, **value} if isinstance(value, dict) else value
    put(store, "meta", name.encode(), json.dumps(after).encode())
    assert {finding.kind for finding in verify(store).findings} == {"format"}
    for flags in ([], ["--untrusted"]):
        done = run("info", store, *flags)
        assert done.returncode == 5, done.stdout
        assert "\x1b" not in done.stdout + done.stderr


def test_untrusted_store_is_opened_after_page_verification(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_untrusted(small_store)
    monkeypatch.setattr("histopipe.maintenance.verify.check_pages", faulty_page)
    monkeypatch.setattr("histopipe.maintenance.verify.check_store", None)  # must not be called
    with pytest.raises(DamagedStore, match="page 3 is damaged"):
        check_untrusted(small_store)


def faulty_page(store: Path, keep_state: bool) -> Examination:
    assert not keep_state
    return Examination(findings=[Finding("structure", "page 3 is damaged")])


@pytest.mark.long(reason="several commands on a run")
def test_paths_in_run_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(GOLDEN / "2026-11-25", tmp_path / "earlier")
    monkeypatch.chdir(tmp_path / "earlier")
    for flags, followed in (((), True), (("--untrusted",), False)):
        succeed("report", "run", "--out", "page.html", *flags)
        assert ("use --store to name the stores" not in Path("page.html").read_text()) == followed


def png_bomb(side: int) -> bytes:
    """Return a PNG of a few kB that declares side × side pixels."""
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(10_000_000))),
        (b"IEND", b""),
    ):
        content += struct.pack(">I", len(data)) + kind + data
        content += struct.pack(">I", zlib.crc32(kind + data))
    return content


def jpeg_bomb(side: int) -> bytes:
    """Return a small JPEG that declares side × side pixels."""
    small = bytearray(jpegs(0, 1, 32)[0])
    start = small.index(b"\xff\xc0")
    small[start + 5 : start + 9] = struct.pack(">HH", side, side)
    return bytes(small)


@pytest.mark.parametrize("bomb", [png_bomb(30_000), jpeg_bomb(65_000)])
def test_declared_image_size_is_checked_before_decoding(tmp_path: Path, bomb: bytes) -> None:
    store = a_store(tmp_path / "s.lmdb", {"a": [*jpegs(0, 2, 32), bomb]}, patch_size=32)
    check_untrusted(store)  # its checksum is right
    with Store(store) as opened:
        for read in (
            lambda: opened.read("a", 2),
            lambda: decode(memoryview(bomb), np.empty((32, 32, 3), np.uint8)),
            lambda: _measures(memoryview(bomb), 32, 2, 8),
            lambda: decode_picture(bomb, "a thumbnail"),
        ):
            with pytest.raises(DamagedStore, match=r"size|decoded"):
                read()


HANGS_HDF5 = (
    "eNrtlktLw0AQx3fzqKFWTKHQ+gBz9CJUvXizYqs9iC3qwaOhTTFgG0li8WaOFfweCn4Bjz36ETz6TWoes3khfaCi4PxgGXZ3Mrud/GfS+3r1YC"
    "G7nCUekkQEIpM4I2C4kpyz/QuwFOwA7BPH1kV/rwTrMsR/ywTzd1g/O6nVPO9RCnZOWQisRJD/SL221/TsOcwVsK9c0q+jqfaNqVls3jIMs21F"
    "+tyZ8VzqKo7GBE7JemC5YKFAkrpMz3lX+Z5nXlkjAty8KJHiHeyLEJ/jgoASVApPWQgn8QtzpBLWVcF16aldzZsvUepXlhxeVUrUpcdwPqpVVo"
    "cDqMNm6FUam4/T40aVEi70uhXH54/lQeFRw0ldiVPpikvpigt1JQfvUWI5rkzQkxP0eFKhyZs4fyIfOVKHPGR9XVtqX7ONtm7C/iz69nKUZ/pO"
    "fY+i+pnzz+kYZle1J8dfjcXnE3EywX2v9LY2xT1pLI7gxymHcXKub8tsbW998l7Z8y+PD8/fm3lnFweO3xvIVzjcbxxRAg0n1Q/j3wtCot7F+p"
    "nPpW7ZxrV+rW2wv05KXzMt3egpm6xJxQOrqYCDRXwJCIIgCIIgCIIgCPLTfADVCtLZ"
)
"""A damaged feature file, compressed, in base64. Opening it hangs, at least with HDF5 1.14.6."""


@pytest.mark.long(reason="each check starts a process, which may hang or crash")
def test_hdf5_files_that_hang_or_declare_huge_sizes(tmp_path: Path) -> None:
    features, intact = tmp_path / "features" / "a.h5", tmp_path / "intact" / "a.h5"
    features.parent.mkdir()
    features.write_bytes(zlib.decompress(base64.b64decode(HANGS_HDF5)))
    with pytest.raises(DamagedStore, match=r"a.h5 cannot be (trusted|read)"):
        check_features(features.parent, seconds=1)
    with writing(intact, 20, 8, "float32") as written:
        written.append(np.ones((20, 8), np.float32), np.zeros((20, 2), np.int64))
        written.finish({}, {})
    check_features(intact.parent)
    # The file declares a terabyte, but has no data.
    with h5py.File(intact, "a") as file:
        del file["features"], file["coords"], file.attrs["crc32"]
        file.create_dataset("features", (1 << 35, 8), np.float32, chunks=(1024, 8))
    with pytest.raises(DamagedStore, match="bytes in a file of"):
        check_features(intact.parent)
    with h5py.File(intact, "w") as file:
        file.create_dataset("coords", (1 << 35, 2), np.int64, chunks=(1024, 2))
        file["coords"].attrs.update({"patch_size": 256, "patch_level": 0})
    with pytest.raises(SlideUnreadable, match="too large for the file size"):
        check_coords(intact.parent)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"id": "../a"}, r"its id: found .../a"), ({"label": "\x1b[2J"}, "control characters")],
)
def test_records_cannot_leave_the_folder_or_control_the_terminal(
    tmp_path: Path, run: RunCommand, fields: dict[str, str], message: str
) -> None:
    store = a_store(tmp_path / "s.lmdb", {"a\xa0b": jpegs(0, 2)})
    with Store(store) as opened:
        assert opened.number("a\xa0b") == 0  # an unusual name is allowed
    edit_record(store, 0, **fields)
    done = run("info", store)
    assert done.returncode == 5 and re.search(message, done.stderr)
    assert "\x1b" not in done.stdout + done.stderr


NAMED = {"stores": ("a.lmdb",), "mil": ("more",)}
RESUMED = {"resume": True, "out": Path()}
CONFIG = {"config": Path("config.toml")}
BOTH = 'stores = ["b.lmdb"]\nmil = ["bags"]\n'


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        (BOTH, NAMED | CONFIG, ["a.lmdb", "more", "b.lmdb", "bags"]),
        (BOTH, NAMED | {"space": Path("config.toml")}, ["a.lmdb", "more", "b.lmdb", "bags"]),
        (BOTH, NAMED | RESUMED, ["a.lmdb", "more", "b.lmdb", "bags"]),
        (BOTH, RESUMED | {"stores": ()}, ["b.lmdb", "bags"]),
        ('stores = "c.lmdb"\nmodel = 5\n', CONFIG, ["c.lmdb"]),
        (BOTH, {"resume": True, "out": None, "stores": ()}, []),  # the command asks for --out
    ],
)
def test_settings_files_and_runs_name_untrusted_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    values: dict[str, Any],
    expected: list[str],
) -> None:
    checked: list[str] = []
    for module in ("maintenance.verify.check_untrusted", "features.feature_sets.check_features"):
        monkeypatch.setattr(f"histopipe.{module}", lambda path: checked.append(path.name))
    monkeypatch.chdir(tmp_path)
    for file in ("a.lmdb/data.mdb", "b.lmdb/data.mdb", "c.lmdb/data.mdb", "bags/x.h5", "more/x.h5"):
        Path(file).parent.mkdir()
        Path(file).touch()
    Path("config.toml").write_text(text)  # also the settings of the run in this folder
    check_untrusted_input(values, model=True)
    assert checked == expected


def test_heatmaps_verify_the_stores_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without --store; of a run without settings, the default store."""
    checked: list[str] = []
    monkeypatch.setattr(
        "histopipe.maintenance.verify.check_untrusted", lambda path: checked.append(path.name)
    )
    monkeypatch.chdir(tmp_path)
    for store in ("a.lmdb", "patches.lmdb"):
        (tmp_path / store).mkdir()
        (tmp_path / store / "data.mdb").touch()
    for text, store in (('stores = ["a.lmdb"]\n', "a.lmdb"), ("", "patches.lmdb")):
        (tmp_path / "config.toml").write_text(text)
        check_untrusted_input({"predictions": tmp_path}, ("stores",), model=False)
        assert checked.pop() == store


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "own.py:network"\n', "Python files and SavedModels can run"),
        ("stores = [", r"config\.toml cannot be read.*expected TOML"),
    ],
)
def test_untrusted_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        check_untrusted_input({"config": tmp_path / "config.toml"}, model=True)
