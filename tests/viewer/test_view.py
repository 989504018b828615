"""Test the viewer's server: pictures, layers, drawings, and requests that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import tifffile
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

import histopipe
from helpers.commands import INTERRUPTIBLE, Run
from helpers.examples import examples
from helpers.inline import WITH_POOLS, PicklingWorkers
from helpers.paths import GOLDEN
from helpers.stores import RECORD, a_store, flip_a_byte
from helpers.viewed import (
    CLASSES,
    PATCH,
    SLIDE,
    Notes,
    fetch,
    make_cross_validation,
    viewing,
)
from histopipe.annotations.annotation_files import find_annotations
from histopipe.errors import UsageError
from histopipe.evaluation.label_errors import read_label_errors
from histopipe.geometry import PointL0, Size
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.slides.readers import open_slide
from histopipe.slides.slide_files import SlideFile, pixel_hash
from histopipe.slides.tables import SlideNames
from histopipe.splits.splits import load_splits
from histopipe.store.store import Store
from histopipe.system.worker_pool import WorkerPool
from histopipe.tasks.task import Predictions
from histopipe.viewer.pictures import OVERLAP, TILE, hatched, read_geometry
from histopipe.viewer.view import Viewer


@pytest.fixture(scope="module", autouse=True)
def _without_workers() -> Iterator[None]:
    """Read slides in this process; `test_broken_slides_show_the_reason` shows the workers."""
    with mock.patch("histopipe.viewer.open_slides.WorkerPool", PicklingWorkers):
        yield


@pytest.fixture(scope="module")
def viewer(viewed: Path) -> Iterator[Viewer]:
    paths = [viewed / name for name in ("patches.lmdb", "run", "bags", "predictions")]
    with viewing(*paths, features=viewed / "features") as running:
        yield running


def as_json(viewer: Viewer, path: str) -> Any:
    status, body, _ = fetch(viewer, path)
    assert status == 200, body
    return json.loads(body)


def picture(viewer: Viewer, path: str) -> NDArray[np.uint8]:
    status, body, headers = fetch(viewer, path)
    assert (status, headers["content-type"].split("/")[0]) == (200, "image"), body[:200]
    return np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))


def difference(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


def layer(
    viewer: Viewer, key: str
) -> tuple[dict[str, Any], NDArray[np.float32], NDArray[np.int32]]:
    """Return a layer's facts, its values, and the (2, N) corners of its patches."""
    description = as_json(viewer, "slides/0")
    number, layer_facts = next(
        (n, entry) for n, entry in enumerate(description["layers"]) if entry["key"] == key
    )
    values = np.frombuffer(fetch(viewer, f"slides/0/layer/{number}")[1], "<f4")
    corners = np.frombuffer(fetch(viewer, f"slides/0/grid/{layer_facts['grid']}")[1], "<i4")
    return layer_facts, values, corners.reshape(2, -1)


def test_tiles_show_the_pixels_of_the_slide(viewer: Viewer, viewed: Path) -> None:
    with open_slide(viewed / "slides" / f"{SLIDE}.svs") as slide:
        size = slide.info.size
        for column, row in ((0, 0), (2, 3), (4, 5)):
            corner = PointL0(max(0, column * TILE - OVERLAP), max(0, row * TILE - OVERLAP))
            right, low = ((at + 1) * TILE + OVERLAP for at in (column, row))
            shape = Size(min(right, size.width) - corner.x, min(low, size.height) - corner.y)
            expected = slide.read_region(corner, 0, shape)
            tile = picture(viewer, f"slides/0/tile/0/{column}/{row}")
            assert difference(tile, expected) < 2.5  # JPEG
        whole = Image.fromarray(slide.read_region(PointL0(0, 0), 0, size))
    for step in (1, 2, 3):
        expected = np.asarray(whole.reduce(2**step))[: TILE + OVERLAP, : TILE + OVERLAP]
        tile = picture(viewer, f"slides/0/tile/{step}/0/0")
        assert difference(tile, expected) < 3
    assert fetch(viewer, "slides/0/tile/0/9/0")[0] == 404
    for step in (33, 99, 3_000_000_000):
        assert fetch(viewer, f"slides/0/tile/{step}/0/0")[0] == 404
    assert fetch(viewer, "slides/" + "1" * 5000)[0] == 404
    assert fetch(viewer, "slides/0/tile/0/0/0")[2]["cache-control"] == "no-store"


def test_layers_equal_the_files(viewer: Viewer, viewed: Path) -> None:
    with Store(viewed / "patches.lmdb") as store:
        index = store.index(0)
    corners = np.stack([index["x_l0"], index["y_l0"]])
    for key in ("tissue", "focus", "covered"):
        _, values, at = layer(viewer, f"quality:{key}")
        np.testing.assert_array_equal(values, index[key])
        np.testing.assert_array_equal(at, corners)
    description, values, _ = layer(viewer, "label")
    assert description["classes"] == list(CLASSES)
    np.testing.assert_array_equal(np.nan_to_num(values, nan=-1), index["label"])
    _, values, _ = layer(viewer, "split:run")
    sides = load_splits(viewed / "run" / "splits.json").slides[0].subsets
    np.testing.assert_array_equal(np.nan_to_num(values, nan=-1), sides)
    _, values, _ = layer(viewer, "run:p:Epidermis")
    for scores in read_predictions(viewed / "run" / "predictions.csv").values():
        assert isinstance(scores, Predictions)
        for x, y, p in zip(scores.x_l0, scores.y_l0, scores.output[:, 1], strict=True):
            row = np.flatnonzero((corners[0] == x) & (corners[1] == y))[0]
            assert values[row] == p
    assert np.isnan(values).sum() == (sides <= 0).sum()
    # Predictions of other patches have another grid.
    description, values, at = layer(viewer, "predictions:predicted")
    assert (description["grid"], len(values)) == (1, 80)
    assert at.max() == 2304
    _, values, _ = layer(viewer, "bags:attention")
    assert sorted(values.tolist()) == pytest.approx(np.linspace(0, 1, len(values)).tolist())


def test_patch_has_its_index_row_and_all_values(viewer: Viewer, viewed: Path) -> None:
    with Store(viewed / "patches.lmdb") as store:
        index = store.index(0)
        for row in (0, 17, len(index["crc"]) - 1):
            patch = as_json(viewer, f"slides/0/patch/0/{row}")
            assert (patch["x"], patch["y"]) == (index["x_l0"][row], index["y_l0"][row])
            assert patch["checksum"] == "matches"
            assert patch["index"]["crc"] == index["crc"][row]
            assert patch["index"]["focus"] == index["focus"][row]
            named = {(entry["group"], entry["title"]): entry["value"] for entry in patch["values"]}
            assert (("labels", "Patch labels") in named) == (index["label"][row] >= 0)
            status, body, _ = fetch(viewer, f"slides/0/picture/{patch['x']}/{patch['y']}")
            assert (status, body) == (200, store.value(0, row))
    assert fetch(viewer, "slides/0/patch/0/100000")[0] == 404


def test_errors_are_the_most_confident_first(viewer: Viewer) -> None:
    sources = as_json(viewer, "slides")["sources"]
    assert [source["name"] for source in sources] == ["run", "bags", "predictions"]
    errors = as_json(viewer, "errors/0")
    assert len(errors) > 2
    assert [error["p"] for error in errors] == sorted(error["p"] for error in errors)
    assert all(error["p"] < 0.5 and error["label"] != error["predicted"] for error in errors)
    assert as_json(viewer, "errors/1") == as_json(viewer, "errors/2") == []
    metrics = as_json(viewer, "metrics")
    assert metrics["bags"]["slides"][SLIDE]["Epidermis"] == pytest.approx(0.7)
    assert metrics["run"]["split"] == {SLIDE: "several"}


def test_labels_to_check_are_those_of_the_cross_validation(viewed: Path, tmp_path: Path) -> None:
    make_cross_validation(tmp_path / "cv", viewed / "run")
    rows = read_label_errors(tmp_path / "cv")
    with viewing(viewed / "patches.lmdb", tmp_path / "cv") as viewer:
        assert as_json(viewer, "slides")["labels"] == ["cv"]
        assert as_json(viewer, "labels/cv") == rows[:201]
        assert rows[0]["level"] == "slide" and {row["level"] for row in rows[1:]} == {"patch"}
        assert as_json(viewer, "labels/other") == []


def test_similar_patches_have_the_highest_cosine(viewer: Viewer, viewed: Path) -> None:
    with h5py.File(viewed / "features" / f"{SLIDE}.h5") as file:
        features, coords = file["features"][...], file["coords"][...]
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    cosine = unit @ unit[20]
    cosine[20] = -2
    expected = np.argsort(-cosine)[:12]
    for everywhere in (0, 1):
        similar = as_json(viewer, f"slides/0/similar/0/20?all={everywhere}")
        assert [(patch["x"], patch["y"]) for patch in similar] == [
            tuple(coords[i]) for i in expected
        ]
        assert [patch["cosine"] for patch in similar] == pytest.approx(
            cosine[expected].tolist(), abs=1e-3
        )


def test_without_the_slide_its_patches_are_shown(viewed: Path, tmp_path: Path) -> None:
    store = shutil.copytree(viewed / "patches.lmdb", tmp_path / "patches.lmdb")
    flip_a_byte(store, 0, 5)
    with Store(viewed / "patches.lmdb") as opened, viewing(store, untrusted=True) as viewer:
        description = as_json(viewer, "slides/0")
        assert description["pixels"] is False
        assert "was not found" in description["notes"][0]
        place, index = description["patches"], opened.index(0)
        for row in (0, 30):
            column, line = ((int(index[n][row]) - place[n[0]]) / PATCH for n in ("x_l0", "y_l0"))
            status, body, _ = fetch(viewer, f"slides/0/patches/0/{column:.0f}/{line:.0f}")
            assert (status, body) == (200, opened.value(0, row))  # not decoded
            coarse = picture(viewer, f"slides/0/patches/1/{column // 2:.0f}/{line // 2:.0f}")
            x, y = (int(at % 2) * PATCH // 2 for at in (column, line))
            part = coarse[y : y + PATCH // 2, x : x + PATCH // 2]
            whole = Image.fromarray(opened.read(SLIDE, row))
            assert difference(part, np.asarray(whole.resize((64, 64), Image.Resampling.BOX))) < 12
        # A damaged patch is hatched, never white.
        column, line = ((int(index[n][5]) - place[n[0]]) // PATCH for n in ("x_l0", "y_l0"))
        tile = picture(viewer, f"slides/0/patches/0/{column:.0f}/{line:.0f}")
        assert difference(tile, hatched(PATCH, PATCH)) < 12
        assert "checksum" in as_json(viewer, "slides/0/patch/0/5")["checksum"]
        assert "mask" in description
        assert picture(viewer, "slides/0/mask").max() == 255


def test_slide_without_patches_has_no_tiles(tmp_path: Path) -> None:
    with viewing(a_store(tmp_path / "empty.lmdb", {"n1": []})) as viewer:
        assert as_json(viewer, "slides/0")["patches"] is None
        assert fetch(viewer, "slides/0/patches/0/0/0")[0] == 404


@pytest.mark.long(reason="a worker that crashes")
def test_broken_slides_show_the_reason_and_the_server_goes_on(viewed: Path, tmp_path: Path) -> None:
    slides = shutil.copytree(viewed / "slides", tmp_path / "slides")
    content = bytearray((slides / f"{SLIDE}.svs").read_bytes())
    content[600_000:640_000] = bytes(40_000)
    (slides / "damaged.svs").write_bytes(content)
    (slides / "text.svs").write_text("no slide")
    notes, pool = Notes(), mock.patch("histopipe.viewer.open_slides.WorkerPool", WorkerPool)
    with pool, viewing(slides, progress=notes) as viewer:
        names = [slide["name"] for slide in as_json(viewer, "slides")["slides"]]
        assert names == [SLIDE, "damaged", "text"]
        tiles = [picture(viewer, f"slides/1/tile/0/{x}/{y}") for x in range(5) for y in range(6)]
        stripes = [(np.abs(t.astype(int) - (196, 60, 52)).sum(axis=2) < 40).sum() for t in tiles]
        lost = sum(count > 2000 for count in stripes)
        assert 1 <= lost < 12  # only where the damage is
        assert "text file" in as_json(viewer, "slides/2")["notes"][0]
        assert picture(viewer, "slides/2/tile/0/0/0").shape == (TILE, TILE, 3)
        assert "text" in notes.messages[-1]
        # A worker that is killed costs at most one tile.
        children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        workers = [int(word) for path in children for word in path.read_text().split()]
        ours = [
            pid for pid in workers if b"worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        for pid in ours:
            os.kill(pid, signal.SIGKILL)
        assert picture(viewer, "slides/0/tile/0/0/1").shape[2] == 3
        assert picture(viewer, "slides/0/tile/0/1/1").std() > 5


def test_changed_tile_of_a_slide_has_a_warning(viewed: Path, tmp_path: Path) -> None:
    """The smallest level is the same, which OpenSlide's quickhash covers. A new time alone is no change."""
    path = Path(shutil.copy(viewed / "slides" / f"{SLIDE}.svs", tmp_path))
    with open_slide(path) as slide:
        quickhash, size = slide.info.quickhash, slide.info.size
    pixels = pixel_hash(SlideFile(SLIDE, path, (path,)), size)
    recorded = replace(
        RECORD, size_bytes=path.stat().st_size, mtime_ns=1, quickhash=quickhash, pixel_hash=pixels
    )
    warnings = []
    for record in (recorded, replace(recorded, pixel_hash=None)):
        warnings.append(read_geometry(str(path), record)["warning"])
    with tifffile.TiffFile(path) as tiff, path.open("r+b") as file:
        file.seek(tiff.pages.first.dataoffsets[0] + 700)
        file.write(b"xyz")
    warnings.append(read_geometry(str(path), recorded)["warning"])
    assert warnings[:2] == [None, None]
    assert "its tiles differ" in warnings[2]


def test_changed_slide_has_a_warning(tmp_path: Path) -> None:
    slide, store = tmp_path / "slide-000.svs", tmp_path / "p.lmdb"
    shutil.copy(GOLDEN / "slides" / slide.name, slide)
    with ExitStack() as stack:
        for name in WITH_POOLS:
            stack.enter_context(mock.patch(f"{name}.WorkerPool", PicklingWorkers))
        histopipe.ingest([slide], store, patch_size=64, tissue="none")
    slide.touch()  # the same scan, for example a copy
    with viewing(store) as viewer:
        assert as_json(viewer, "slides/0")["notes"] == []
    with slide.open("ab") as file:
        file.write(b"more")
    with viewing(store) as viewer:
        assert "has changed since it was ingested" in as_json(viewer, "slides/0")["notes"][0]
    with viewing(store, untrusted=True) as viewer:  # follows no recorded path
        assert as_json(viewer, "slides/0")["pixels"] is False


SQUARE = {
    "type": "Feature",
    "geometry": {
        "type": "Polygon",
        "coordinates": [[[0, 0], [2220, 0], [2220, 2967], [0, 2967], [0, 0]]],
    },
    "properties": {"objectType": "annotation", "classification": {"name": "All"}},
}


def put(viewer: Viewer, value: Any, **headers: str) -> tuple[int, Any]:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = {"content_type": "application/json", **headers}
    status, answer, _ = fetch(viewer, "slides/0/drawing", method="PUT", body=body, **headers)
    return status, json.loads(answer) if answer.startswith(b"{") else answer


def test_drawing_is_saved_kept_and_used(viewed: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "outlines"
    store = shutil.copytree(viewed / "patches.lmdb", tmp_path / "patches.lmdb")
    point = {
        "type": "Feature",
        "geometry": {"type": "Point", "coordinates": [1, 2]},
        "properties": {"x": 1},
    }
    with viewing(store, annotations=folder) as viewer:
        empty = as_json(viewer, "slides/0/drawing")
        assert (empty["features"], empty["version"], empty["origin"]) == ([], "", [0, 0])
        status, saved = put(viewer, {"features": [SQUARE, point], "version": ""})
        assert status == 200
        again = as_json(viewer, "slides/0/drawing")
        assert again["features"] == [SQUARE, point]  # also what is no area
        assert again["version"] == saved["version"]
        first = (folder / f"{SLIDE}.geojson").read_bytes()
        status, answer = put(viewer, {"features": [], "version": "00000000-1"})
        assert status == 409
        assert "changed meanwhile" in answer["error"]
        assert (folder / f"{SLIDE}.geojson").read_bytes() == first
        assert put(viewer, {"features": [SQUARE], "version": saved["version"]})[0] == 200
        assert (folder / f"{SLIDE}.geojson.previous").read_bytes() == first
        wrong: list[Any] = [
            b"{",
            {"features": 3, "version": ""},
            {"features": [{"type": "X"}], "version": ""},
            b"[]",
            {"version": 1},
            {
                "features": [
                    {**SQUARE, "geometry": {"type": "Polygon", "coordinates": [[["a", 0]]]}}
                ],
                "version": "",
            },
        ]
        for value in wrong:
            status, answer = put(viewer, value)
            assert status == 400, value
            assert answer["error"]
        assert put(viewer, {}, content_type="text/plain")[0] == 415
        assert put(viewer, {}, origin="http://evil.example")[0] == 403
    done = run("annotate", store, folder)
    assert done.returncode == 0, done.stderr
    with Store(store) as opened:
        assert "All" in opened.classes
        assert (opened.index(0)["label"] == opened.classes.index("All")).all()
    with viewing(store) as viewer:
        assert fetch(viewer, "slides/0/drawing")[0] == 404
        assert put(viewer, {"features": [], "version": ""})[0] == 404


def test_drawing_over_xml_keeps_it(viewed: Path, tmp_path: Path, data: Path) -> None:
    xml = tmp_path / f"{SLIDE}.xml"
    shutil.copy(data / "annotations" / f"{SLIDE}.asap.xml", xml)
    content = xml.read_bytes()
    with viewing(viewed / "patches.lmdb", annotations=tmp_path) as viewer:
        drawing = as_json(viewer, "slides/0/drawing")
        assert len(drawing["features"]) == 7
        classes = {
            feature["properties"]["classification"]["name"] for feature in drawing["features"]
        }
        assert classes == set(CLASSES)
        status, _ = put(viewer, {"features": drawing["features"], "version": drawing["version"]})
        assert status == 200
    assert not xml.exists()
    assert (tmp_path / f"{SLIDE}.xml.previous").read_bytes() == content
    assert len(json.loads((tmp_path / f"{SLIDE}.geojson").read_text())["features"]) == 7


def test_drawing_touches_no_file_of_another_slide(tmp_path: Path, data: Path) -> None:
    """Files are matched with slides as by `annotate`: an exact name of a slide belongs to no other."""
    slides, folder = tmp_path / "slides", tmp_path / "outlines"
    (slides / "sub").mkdir(parents=True)
    folder.mkdir()
    for name in ("a", "a.1", "sub/c"):
        shutil.copy(GOLDEN / "slides" / "slide-000.svs", slides / f"{name}.svs")
    source = data / "annotations" / f"{SLIDE}.geojson"
    for name in ("a.1.geojson", "c.GEOJSON"):
        shutil.copy(source, folder / name)
    with viewing(slides, annotations=folder) as viewer:
        names = [slide["name"] for slide in as_json(viewer, "slides")["slides"]]
        assert names == ["a", "a.1", "sub/c"]
        for number, count, file in (
            (0, 0, "a.geojson"),
            (1, 7, "a.1.geojson"),
            (2, 7, "c.GEOJSON"),
        ):
            drawing = as_json(viewer, f"slides/{number}/drawing")
            assert (len(drawing["features"]), drawing["file"]) == (count, file)
            body = json.dumps({"features": [SQUARE], "version": drawing["version"]}).encode()
            status, answer, _ = fetch(
                viewer,
                f"slides/{number}/drawing",
                method="PUT",
                body=body,
                content_type="application/json",
            )
            assert (status, json.loads(answer)["file"]) == (200, file)
    kept = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    assert kept == {
        "a.geojson",
        "a.1.geojson",
        "a.1.geojson.previous",
        "c.GEOJSON",
        "c.GEOJSON.previous",
    }
    outlines, _ = find_annotations(folder, SlideNames(["a", "a.1", "sub/c"]))
    assert {name: path.name for name, path in outlines.items()} == {
        "a": "a.geojson",
        "a.1": "a.1.geojson",
        "sub/c": "c.GEOJSON",
    }


def test_drawings_that_cannot_be_saved_have_a_reason(viewed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "outlines"
    with viewing(viewed / "patches.lmdb", annotations=folder) as viewer:
        deep: Any = 1
        for _ in range(300):
            deep = [deep]
        for properties in ({"classification": {"name": "\ud800x"}}, {"x": deep}):
            value = {"features": [{**SQUARE, "properties": properties}], "version": ""}
            status, answer = put(viewer, value)
            assert status == 400
            assert answer["error"]
        assert not folder.exists() or not list(folder.glob("*.geojson"))
        folder.rmdir() if folder.exists() else None
        folder.write_text("a file")
        status, answer = put(viewer, {"features": [SQUARE], "version": ""})
        assert status == 500
        assert "outlines" in answer["error"]
    with (
        pytest.raises(UsageError, match="which is a file"),
        viewing(viewed / "slides", annotations=folder / "x"),
    ):
        pass


def test_predictions_of_other_patches_have_their_size(viewed: Path, tmp_path: Path) -> None:
    """The grid has the size that was predicted, also if its corners are those of patches of the store."""
    folder = Path(shutil.copytree(viewed / "predictions", tmp_path / "predictions"))
    with viewing(viewed / "patches.lmdb", folder) as viewer:
        assert [grid["size"] for grid in as_json(viewer, "slides/0")["grids"]] == [PATCH, 256]
        status, body, _ = fetch(viewer, "slides/0/picture/1024/1024?size=256")
        assert status == 200
        assert Image.open(io.BytesIO(body)).size == (256, 256)
    twice = [
        shutil.copytree(viewed / "predictions", tmp_path / name / "cv" / "one") for name in "ab"
    ]
    with viewing(viewed / "patches.lmdb", *map(Path, twice)) as viewer:
        assert [source["name"] for source in as_json(viewer, "slides")["sources"]] == [
            "a/cv/one",
            "b/cv/one",
        ]
        keys = [entry["key"] for entry in as_json(viewer, "slides/0")["layers"]]
        assert len(set(keys)) == len(keys)


def test_files_that_are_no_pictures_are_not_sent(viewed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(viewed / "predictions", tmp_path / "predictions"))
    for make in (os.mkfifo, lambda path: path.symlink_to("/etc/hostname")):
        path = folder / "patches" / f"{SLIDE}.jpg"
        path.unlink(missing_ok=True)
        make(path)
        with viewing(folder, untrusted=True) as viewer:
            assert fetch(viewer, "slides/0/overview")[1].startswith(b"\x89PNG")


def test_changes_of_the_store_are_noted(viewed: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(viewed / "patches.lmdb", tmp_path / "patches.lmdb"))
    with viewing(store) as viewer:
        assert as_json(viewer, "slides/0")["notes"] == []
        os.utime(store / "data.mdb")
        assert "start it again" in as_json(viewer, "slides/0")["notes"][0]


def test_wrong_tokens_hosts_and_paths_are_refused(viewer: Viewer) -> None:
    good = viewer.token
    for path in (
        "//",
        "///",
        f"//{good[:-1]}/slides",
        f"//{good}x/",
        "//favicon.ico",
        f"//%2e/{good}/",
    ):
        status, body, headers = fetch(viewer, path)
        assert status == 403, path
        assert b"token" in body
        assert "content-security-policy" in headers
    for name in (
        "../view.py",
        "..%2fview.py",
        "%2e%2e/server.py",
        "/etc/passwd",
        "view.py",
        "VENDORED.md",
    ):
        assert fetch(viewer, f"static/{name}")[0] in (403, 404), name
    assert fetch(viewer, "slides", host="evil.example:80")[0] == 403
    assert fetch(viewer, "slides", host="evil.example")[0] == 403
    assert fetch(viewer, "slides", host=f"localhost:{viewer.port}")[0] == 200
    assert fetch(viewer, "slides", origin="http://evil.example")[0] == 403
    assert fetch(viewer, "slides", method="POST")[0] == 405
    status, _, headers = fetch(viewer, "")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


PARTS = st.one_of(
    st.sampled_from(
        [
            "slides",
            "0",
            "1",
            "99",
            "tile",
            "patches",
            "layer",
            "grid",
            "patch",
            "picture",
            "drawing",
        ]
    ),
    st.sampled_from(
        [
            "-1",
            "9" * 30,
            "1e5",
            "0x1",
            "..",
            ".",
            "%00",
            "%2f",
            "nan",
            "similar",
            "errors",
            "static",
        ]
    ),
    st.text(
        st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#? \\"), max_size=8
    ),
)


@given(
    st.lists(PARTS, max_size=6),
    st.sampled_from(["", "?size=nan", "?size=-1", "?size=1e9", "?all=x"]),
)
@settings(examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_path_is_answered(viewer: Viewer, parts: list[str], query: str) -> None:
    status, body, _ = fetch(viewer, "/".join(parts) + query)
    assert status in (200, 307, 400, 403, 404, 405)
    assert b"Traceback" not in body


@pytest.mark.nightly(reason="a thousand requests")
def test_many_requests_and_clients_that_go_away(viewer: Viewer) -> None:
    address = (viewer.host, viewer.port)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = min(1000, files // 3)  # a connection has a file at each end
    paths = [f"slides/0/tile/0/{i % 5}/{i // 5 % 6}" for i in range(number)]
    sockets = [socket.create_connection(address, timeout=120) for _ in paths]
    for connection, path in zip(sockets, paths, strict=True):
        request = (
            f"GET /{viewer.token}/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(request.encode())
    for connection in sockets[1::2]:
        connection.close()
    for connection in sockets[::2]:
        with contextlib.closing(connection):
            assert connection.makefile("rb").read(12) == b"HTTP/1.1 200"
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /\x00 nonsense\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert as_json(viewer, "slides")["slides"]


def test_python_threads_end_with_the_viewer(viewed: Path) -> None:
    before = threading.active_count()
    with viewing(viewed / "patches.lmdb") as viewer:
        assert viewer.to_json()["slides"] == viewer.slides == 1
        assert viewer.url in str(viewer)
        assert fetch(viewer, "slides/0/tile/0/0/0")[0] == 200
        with pytest.raises(UsageError, match="in use"), viewing(viewed, port=viewer.port):
            pass
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_interrupt_waits_for_the_end_of_the_server(
    viewed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    async def slow(*_: object, **__: object) -> None:
        await asyncio.sleep(0.2)
        ended.set()

    monkeypatch.setattr(uvicorn.Server, "shutdown", slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with viewing(viewed / "patches.lmdb") as viewer:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            viewer.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()


def test_interrupt_ends_the_command(viewed: Path) -> None:
    words = ["view", str(viewed / "patches.lmdb"), "--port", "0", "--json"]
    environment = {**os.environ, "DISPLAY": ""}
    with subprocess.Popen(
        [*INTERRUPTIBLE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        text = b""
        while not text.endswith(b"}\n"):
            text += process.stdout.readline()
        url = json.loads(text)["url"]
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_wrong_use_is_explained(viewed: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    unfinished = shutil.copytree(viewed / "run", tmp_path / "unfinished")
    (unfinished / "predictions.csv").unlink()
    moved = shutil.copytree(viewed / "run", tmp_path / "moved")
    text = (moved / "config.toml").read_text()
    (moved / "config.toml").write_text(text.replace(str(viewed / "patches.lmdb"), "/nowhere.lmdb"))
    damaged = tmp_path / "damaged.lmdb"
    damaged.mkdir()
    (damaged / "data.mdb").write_bytes(b"x" * 5000)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[tuple[Any, ...], int, str]] = [
            ((), 4, "no store at patches.lmdb; pass a store"),
            (("empty",), 4, "no slide in empty"),
            (("absent",), 2, "absent cannot be read"),
            (("unfinished",), 2, "expected a finished run; finish it: histopipe train --resume"),
            (("moved",), 4, "the store of the run moved cannot be opened"),
            (("damaged.lmdb",), 5, "damaged.lmdb"),
            ((viewed / "features",), 2, "has features, which are no pictures"),
            ((viewed / "slides", "--port", port), 2, "choose another --port"),
            ((viewed / "slides", "--port", "x"), 2, "Invalid value for '--port'"),
            ((viewed / "slides", "--host", "203.0.113.1"), 2, "cannot listen on 203.0.113.1"),
            ((viewed / "slides", "--token", "short"), 2, "expected at least 16 letters"),
            ((viewed / "slides", "--features", "absent"), 2, "absent is not a folder"),
            ((viewed / "slides", "--workers", "0"), 2, "--workers: found 0, expected 1 or more"),
            ((viewed / "slides", "--host", ""), 2, "--host: found nothing"),
            ((viewed / "slides", "--features", "empty"), 2, "empty has no features"),
        ]
        for words, code, message in cases:
            done = run("view", *words, "--no-browser")
            assert done.returncode == code, (words, done.stderr)
            assert message in done.stderr, words
            assert "Traceback" not in done.stderr


def test_the_copy_of_openseadragon_is_the_recorded_one() -> None:
    folder = resources.files("histopipe.viewer") / "static"
    digest = hashlib.sha256((folder / "openseadragon.min.js").read_bytes()).hexdigest()
    assert digest in (folder / "VENDORED.md").read_text()
    assert "Redistribution and use" in (folder / "openseadragon.LICENSE.txt").read_text()


def test_address_of_all_machines_has_a_warning(viewed: Path) -> None:
    notes = Notes()
    with viewing(viewed / "slides", host="0.0.0.0", progress=notes) as viewer:  # noqa: S104
        assert "can be reached from other machines" in notes.messages[0]
        assert fetch(viewer, "slides", host="some.name:80")[0] == 200
