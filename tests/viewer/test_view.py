"""Test the viewer's server: pictures, layers, drawings, and requests that are refused."""

from __future__ import annotations

import asyncio
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
from PIL import ExifTags, Image

from helpers.commands import INTERRUPTIBLE, RunCommand, pool_workers
from helpers.examples import examples
from helpers.inline import PicklingWorkers
from helpers.paths import GOLDEN
from helpers.stores import a_store, flip_a_byte
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
from histopipe.geometry import PointL0
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.predictions.sources import PredictedSlide
from histopipe.slides.slide_files import SlideNames, open_slide
from histopipe.splits.splits import load_splits
from histopipe.store.store import Store
from histopipe.system.worker_pool import WorkerPool
from histopipe.viewer.pictures import OVERLAP, TILE, hatched
from histopipe.viewer.view import Viewer, view


@pytest.fixture(scope="module", autouse=True)
def _without_workers() -> Iterator[None]:
    """Read slides in this process; `test_broken_slides_show_the_reason` shows the workers."""
    with mock.patch("histopipe.viewer.layers.WorkerPool", PicklingWorkers):
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
        pixels = slide.read_region(PointL0(0, 0), 0, size)
    for column, row in ((0, 0), (2, 3), (4, 5)):
        left, top = (max(0, at * TILE - OVERLAP) for at in (column, row))
        right, low = ((at + 1) * TILE + OVERLAP for at in (column, row))
        tile = picture(viewer, f"slides/0/tile/0/{column}/{row}")
        assert difference(tile, pixels[top:low, left:right]) < 2.5  # JPEG
    for step in (1, 2, 3):
        expected = np.asarray(Image.fromarray(pixels).reduce(2**step))
        tile = picture(viewer, f"slides/0/tile/{step}/0/0")
        assert difference(tile, expected[: TILE + OVERLAP, : TILE + OVERLAP]) < 3
    for path in ("0/tile/0/9/0", "0/tile/33/0/0", "0/tile/3000000000/0/0", "1" * 5000):
        assert fetch(viewer, f"slides/{path}")[0] == 404


def test_layers_equal_the_files(viewer: Viewer, viewed: Path) -> None:
    with Store(viewed / "patches.lmdb") as store:
        index = store.index(0)
    corners = np.stack([index["x_l0"], index["y_l0"]])
    columns = {f"quality:{name}": index[name] for name in ("tissue", "focus", "covered")}
    numbers = {
        "label": index["label"],
        "split:run": load_splits(viewed / "run" / "splits.json").slides[0].subsets,
    }
    columns |= {key: np.where(column < 0, np.nan, column) for key, column in numbers.items()}
    columns["run:p:Epidermis"] = np.full(len(index["label"]), np.nan, np.float32)
    for scores in read_predictions(viewed / "run" / "predictions.csv").values():
        for x, y, p in zip(scores.x_l0, scores.y_l0, scores.output[:, 1], strict=True):
            columns["run:p:Epidermis"][(corners[0] == x) & (corners[1] == y)] = p
    for key, expected in columns.items():
        _, values, at = layer(viewer, key)
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(at, corners)
    assert layer(viewer, "label")[0]["classes"] == list(CLASSES)
    # Predictions of other patches have another grid.
    description, values, at = layer(viewer, "predictions:predicted")
    assert (description["grid"], len(values), at.max()) == (1, 80, 2304)
    _, values, _ = layer(viewer, "bags:attention")
    assert sorted(values.tolist()) == pytest.approx(np.linspace(0, 1, len(values)).tolist())


def test_patch_has_its_index_row_and_all_values(viewer: Viewer, viewed: Path) -> None:
    with Store(viewed / "patches.lmdb") as store:
        index = store.index(0)
        for row in (0, 17, len(index["crc"]) - 1):
            patch = as_json(viewer, f"slides/0/patch/0/{row}")
            assert (patch["x"], patch["y"]) == (index["x_l0"][row], index["y_l0"][row])
            assert patch["checksum"] == "matches"
            for name in ("crc", "focus"):
                assert patch["index"][name] == index[name][row]
            labels = [value for value in patch["values"] if value["title"] == "Patch labels"]
            assert bool(labels) == (index["label"][row] >= 0)
            answer = fetch(viewer, f"slides/0/picture/{patch['x']}/{patch['y']}")
            assert answer[:2] == (200, store.value(0, row))
    assert fetch(viewer, "slides/0/patch/0/100000")[0] == 404


def test_errors_are_the_most_confident_first(viewer: Viewer) -> None:
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
    expected = np.argsort(-cosine)[1:13]  # without the patch itself
    for everywhere in (0, 1):
        similar = as_json(viewer, f"slides/0/similar/0/20?all={everywhere}")
        assert [[patch["x"], patch["y"]] for patch in similar] == coords[expected].tolist()
        assert [patch["cosine"] for patch in similar] == pytest.approx(
            cosine[expected].tolist(), abs=1e-3
        )


def test_without_the_slide_its_patches_are_shown(viewed: Path, tmp_path: Path) -> None:
    store = shutil.copytree(viewed / "patches.lmdb", tmp_path / "patches.lmdb")
    flip_a_byte(store, 0, 5)
    with Store(viewed / "patches.lmdb") as opened, viewing(store, untrusted=True) as viewer:
        description = as_json(viewer, "slides/0")
        assert description["pixels"] is False and "was not found" in description["notes"][0]
        place, index = description["patches"], opened.index(0)
        columns, lines = (
            ((index[name] - place[name[0]]) // PATCH).astype(int).tolist()
            for name in ("x_l0", "y_l0")
        )
        for row in (0, 30):
            path = f"slides/0/patches/0/{columns[row]}/{lines[row]}"
            assert fetch(viewer, path)[:2] == (200, opened.value(0, row))  # not decoded
            path = f"slides/0/patches/1/{columns[row] // 2}/{lines[row] // 2}"
            x, y = (at % 2 * PATCH // 2 for at in (columns[row], lines[row]))
            part = picture(viewer, path)[y : y + PATCH // 2, x : x + PATCH // 2]
            whole = Image.fromarray(opened.read(SLIDE, row))
            assert difference(part, np.asarray(whole.resize((64, 64), Image.Resampling.BOX))) < 12
        # A damaged patch is hatched, never white.
        tile = picture(viewer, f"slides/0/patches/0/{columns[5]}/{lines[5]}")
        assert difference(tile, hatched(PATCH, PATCH)) < 12
        assert "checksum" in as_json(viewer, "slides/0/patch/0/5")["checksum"]
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
    notes, pool = Notes(), mock.patch("histopipe.viewer.layers.WorkerPool", WorkerPool)
    with pool, viewing(slides, progress=notes) as viewer:
        tiles = [picture(viewer, f"slides/1/tile/0/{x}/{y}") for x in range(5) for y in range(6)]
        stripes = [(np.abs(t.astype(int) - (196, 60, 52)).sum(axis=2) < 40).sum() for t in tiles]
        assert 1 <= sum(count > 2000 for count in stripes) < 12  # only where the damage is
        assert "text file" in as_json(viewer, "slides/2")["notes"][0]
        assert picture(viewer, "slides/2/tile/0/0/0").shape == (TILE, TILE, 3)
        assert "text" in notes.messages[-1]
        # A worker that is killed costs at most one tile.
        for pid in pool_workers(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        assert picture(viewer, "slides/0/tile/0/0/1").shape[2] == 3
        assert picture(viewer, "slides/0/tile/0/1/1").std() > 5


def test_changed_slide_has_a_warning(viewed: Path, tmp_path: Path) -> None:
    """Also if only a tile differs, which OpenSlide's quickhash does not cover. A new time alone is no change."""
    path = Path(shutil.copy(viewed / "slides" / f"{SLIDE}.svs", tmp_path))

    def notes() -> list[str]:
        with viewing(viewed / "patches.lmdb", path) as viewer:
            return list(as_json(viewer, "slides/0")["notes"])

    assert notes() == []
    with tifffile.TiffFile(path) as tiff, path.open("r+b") as file:
        file.seek(tiff.pages.first.dataoffsets[0] + 700)
        file.write(b"xyz")
    assert "its tiles differ" in notes()[0]
    path.write_bytes(path.read_bytes() + b"more")
    assert "bytes, then" in notes()[0]


SQUARE = {
    "type": "Feature",
    "geometry": {
        "type": "Polygon",
        "coordinates": [[[0, 0], [2220, 0], [2220, 2967], [0, 2967], [0, 0]]],
    },
    "properties": {"objectType": "annotation", "classification": {"name": "All"}},
}


def put(viewer: Viewer, value: Any, slide: int = 0, **headers: str) -> tuple[int, Any]:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    headers = {"content_type": "application/json", **headers}
    path = f"slides/{slide}/drawing"
    status, answer, _ = fetch(viewer, path, method="PUT", body=body, **headers)
    return status, json.loads(answer) if answer.startswith(b"{") else answer


def test_drawing_is_saved_kept_and_used(viewed: Path, tmp_path: Path, run: RunCommand) -> None:
    file = tmp_path / "outlines" / f"{SLIDE}.geojson"
    store = shutil.copytree(viewed / "patches.lmdb", tmp_path / "patches.lmdb")
    point = {
        "type": "Feature",
        "geometry": {"type": "Point", "coordinates": [1, 2]},
        "properties": {"x": 1},
    }
    with viewing(store, annotations=file.parent) as viewer:
        empty = as_json(viewer, "slides/0/drawing")
        assert (empty["features"], empty["version"], empty["origin"]) == ([], "", [0, 0])
        status, saved = put(viewer, {"features": [SQUARE, point], "version": ""})
        assert status == 200
        again = as_json(viewer, "slides/0/drawing")
        assert again["features"] == [SQUARE, point]  # also what is no area
        assert again["version"] == saved["version"]
        first = file.read_bytes()
        status, answer = put(viewer, {"features": [], "version": "00000000-1"})
        assert (status, file.read_bytes()) == (409, first)
        assert "changed meanwhile" in answer["error"]
        assert put(viewer, {"features": [SQUARE], "version": saved["version"]})[0] == 200
        assert file.with_name(f"{file.name}.previous").read_bytes() == first
        assert put(viewer, {}, content_type="text/plain")[0] == 415
        assert put(viewer, {}, origin="http://evil.example")[0] == 403
    done = run("annotate", store, file.parent)
    assert done.returncode == 0, done.stderr
    with Store(store) as opened, viewing(store) as viewer:
        assert (opened.index(0)["label"] == opened.classes.index("All")).all()
        assert fetch(viewer, "slides/0/drawing")[0] == 404
        assert put(viewer, {"features": [], "version": ""})[0] == 404


def test_states_of_slides(viewed: Path, tmp_path: Path) -> None:
    """Of a slide model's predictions: the class is text; a slide without picture and a turned image have their reason."""
    bags = tmp_path / "bags"
    for name in ("attention", "patches"):
        (bags / name).mkdir(parents=True)
    (bags / "predict.json").write_text("{}")
    place: Any = {"width": 999, "height": 999, "bounds": [0, 0, 999, 999], "mpp": 1.0}
    slide = PredictedSlide(
        slide="none",
        patient="p",
        label=None,
        **place,
        mpp_source=None,
        size_l0=99,
        stride_l0=99,
        source="",
    )
    slide.write(bags / "patches" / "none.json")
    table = "slide,patient,label,patches,predicted,decided,p_a,p_b\nnone,p,,1,b,b,0.25,0.75\n"
    (bags / "slides.csv").write_text(table)
    image = Image.fromarray(np.full((60, 90, 3), 99, np.uint8))
    exif = image.getexif()
    exif[ExifTags.Base.Orientation] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    with viewing(
        bags, viewed / "slides", tmp_path / "turned.png", annotations=tmp_path / "o"
    ) as viewer:
        listed = as_json(viewer, "slides")
        assert listed["sources"] == [{"name": "bags", "classes": ["a", "b"]}]
        names = [entry["name"] for entry in listed["slides"]]
        assert as_json(viewer, "metrics")["bags"]["slides"]["none"]["predicted"] == "b"
        none, turned = names.index("none"), names.index("turned")
        (note,) = as_json(viewer, f"slides/{none}")["notes"]
        assert note.startswith("there is no picture of the slide: pass its file")
        for path in ("overview", "thumbnail"):
            _, picture, _ = fetch(viewer, f"slides/{none}/{path}")
            with Image.open(io.BytesIO(picture)) as opened:
                assert opened.getextrema() == (235, 235)  # pale grey, not black
        status, answer, _ = fetch(viewer, f"slides/{turned}/drawing")
        assert status == 404 and b"drawing is off: the image is turned" in answer
        assert put(viewer, {"features": [SQUARE], "version": ""}, turned)[0] == 404


def test_drawing_over_xml_keeps_it(viewed: Path, tmp_path: Path, data: Path) -> None:
    xml = tmp_path / f"{SLIDE}.xml"
    shutil.copy(data / "annotations" / f"{SLIDE}.asap.xml", xml)
    content = xml.read_bytes()
    with viewing(viewed / "patches.lmdb", annotations=tmp_path) as viewer:
        drawing = as_json(viewer, "slides/0/drawing")
        names = [each["properties"]["classification"]["name"] for each in drawing["features"]]
        assert len(names) == 7 and set(names) == set(CLASSES)
        value = {"features": drawing["features"], "version": drawing["version"]}
        assert put(viewer, value)[0] == 200
        assert as_json(viewer, "slides/0/drawing")["features"] == drawing["features"]
    assert not xml.exists()
    assert xml.with_name(f"{xml.name}.previous").read_bytes() == content


def test_drawing_touches_no_file_of_another_slide(tmp_path: Path, data: Path) -> None:
    """Files are matched with slides as by `annotate`: an exact name of a slide belongs to no other."""
    slides, folder = tmp_path / "slides", tmp_path / "outlines"
    for name in ("a", "a.1", "sub/c"):
        (slides / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(GOLDEN / "slides" / "slide-000.svs", slides / f"{name}.svs")
    folder.mkdir()
    for name in ("a.1.geojson", "c.GEOJSON"):
        shutil.copy(data / "annotations" / f"{SLIDE}.geojson", folder / name)
    files = {"a": "a.geojson", "a.1": "a.1.geojson", "sub/c": "c.GEOJSON"}
    with viewing(slides, annotations=folder) as viewer:
        for number, file in enumerate(files.values()):
            drawing = as_json(viewer, f"slides/{number}/drawing")
            assert (len(drawing["features"]), drawing["file"]) == (7 if number else 0, file)
            answer = put(viewer, {"features": [SQUARE], "version": drawing["version"]}, number)
            assert (answer[0], answer[1]["file"]) == (200, file)
    kept = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    assert kept == {*files.values(), "a.1.geojson.previous", "c.GEOJSON.previous"}
    outlines, _ = find_annotations(folder, SlideNames(list(files)))
    assert {name: path.name for name, path in outlines.items()} == files


def test_drawings_that_cannot_be_saved_have_a_reason(viewed: Path, tmp_path: Path) -> None:
    folder, deep = tmp_path / "outlines", json.loads("[" * 300 + "]" * 300)
    wrong: list[Any] = [
        b"{",
        b"[]",
        {"version": 1},
        {"features": 3, "version": ""},
    ]
    for changes in (
        {"type": "X"},
        {"geometry": {"type": "Polygon", "coordinates": [[["a", 0]]]}},
        {"properties": {"classification": {"name": "\ud800x"}}},
        {"properties": {"x": deep}},
    ):
        wrong.append({"features": [{**SQUARE, **changes}], "version": ""})
    with viewing(viewed / "patches.lmdb", annotations=folder) as viewer:
        for value in wrong:
            status, answer = put(viewer, value)
            assert status == 400 and answer["error"], value
        assert not list(tmp_path.rglob("*.geojson"))
        shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("a file")
        status, answer = put(viewer, {"features": [SQUARE], "version": ""})
        assert status == 500 and "outlines" in answer["error"]
    with pytest.raises(UsageError, match="which is a file"):
        view(viewed / "slides", annotations=folder / "x")


def test_predictions_of_other_patches_have_their_size(viewed: Path, tmp_path: Path) -> None:
    """The grid has the size that was predicted, also if its corners are those of patches of the store."""
    with viewing(viewed / "patches.lmdb", viewed / "predictions") as viewer:
        assert [grid["size"] for grid in as_json(viewer, "slides/0")["grids"]] == [PATCH, 256]
        assert picture(viewer, "slides/0/picture/1024/1024?size=256").shape == (256, 256, 3)
    # Folders of one name are different sources.
    names = ("a/cv/one", "b/cv/one")
    twice = [shutil.copytree(viewed / "predictions", tmp_path / name) for name in names]
    with viewing(viewed / "patches.lmdb", *map(Path, twice)) as viewer:
        sources = as_json(viewer, "slides")["sources"]
        assert tuple(source["name"] for source in sources) == names
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
        assert status == 403 and b"token" in body, path
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
    requests: tuple[tuple[int, dict[str, Any]], ...] = (
        (200, {"host": f"localhost:{viewer.port}"}),
        (403, {"host": "evil.example:80"}),
        (403, {"host": "evil.example"}),
        (403, {"origin": "http://evil.example"}),
        (405, {"method": "POST"}),
    )
    for status, request in requests:
        assert fetch(viewer, "slides", **request)[0] == status, request
    status, _, headers = fetch(viewer, "")
    policy = headers.pop("content-security-policy")
    assert "default-src 'none'" in policy and "unsafe" not in policy
    expected = {
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
    }
    assert status == 200 and expected.items() <= headers.items()
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
    sockets = [socket.create_connection(address, timeout=120) for _ in range(number)]
    for i, connection in enumerate(sockets):
        path = f"{viewer.token}/slides/0/tile/0/{i % 5}/{i // 5 % 6}"
        request = f"GET /{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
    for connection in sockets[1::2]:
        connection.close()
    for connection in sockets[::2]:
        with connection:
            assert connection.makefile("rb").read(12) == b"HTTP/1.1 200"
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /\x00 nonsense\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
    assert as_json(viewer, "slides")["slides"]


def test_python_threads_end_with_the_viewer(viewed: Path) -> None:
    before = threading.active_count()
    with viewing(viewed / "patches.lmdb") as viewer:
        assert viewer.to_json()["slides"] == viewer.slides == 1
        assert fetch(viewer, "slides/0/tile/0/0/0")[0] == 200
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
    words = ["view", str(viewed / "patches.lmdb"), "--port", "0", "--json", "--no-browser"]
    with subprocess.Popen(
        [*INTERRUPTIBLE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        text = b""
        while not text.endswith(b"}\n"):
            text += process.stdout.readline()
        assert json.loads(text)["url"].startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_wrong_use_is_explained(viewed: Path, tmp_path: Path, run: RunCommand) -> None:
    (tmp_path / "empty").mkdir()
    unfinished = shutil.copytree(viewed / "run", tmp_path / "unfinished")
    (unfinished / "predictions.csv").unlink()
    config = shutil.copytree(viewed / "run", tmp_path / "moved") / "config.toml"
    config.write_text(config.read_text().replace(f"{viewed}/patches.lmdb", "/nowhere.lmdb"))
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
            assert done.returncode == code and message in done.stderr, (words, done.stderr)


def test_the_copy_of_openseadragon_is_the_recorded_one() -> None:
    folder = resources.files("histopipe.viewer") / "static"
    digest = hashlib.sha256((folder / "openseadragon.min.js").read_bytes()).hexdigest()
    assert digest in (folder / "VENDORED.md").read_text()


def test_address_of_all_machines_has_a_warning(viewed: Path) -> None:
    notes = Notes()
    with viewing(viewed / "slides", host="0.0.0.0", progress=notes) as viewer:  # noqa: S104
        assert "can be reached from other machines" in notes.messages[0]
        assert fetch(viewer, "slides", host="some.name:80")[0] == 200
