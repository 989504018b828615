"""Test heatmaps: pixels equal a slow reference, files can be read back, and errors are reported."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colormaps, rc_context, rcParams
from PIL import Image
from tifffile import TiffFile

from helpers.commands import RunCommand
from helpers.examples import examples
from helpers.scores import class_predictions
from helpers.stores import a_store
from helpers.trainings import csv_rows
from histopipe.annotations.annotation_files import read_annotations
from histopipe.geometry import PointL0, Size
from histopipe.predictions.patch_values import NamedPatchValues, SlideImages, find_slide
from histopipe.predictions.prediction_tables import ranks_of, write_predictions
from histopipe.predictions.sources import PredictedSlide, PredictionsFolder
from histopipe.reports.charts import lines
from histopipe.reports.heatmap import (
    scale_bar_um,
    write_heatmap_geojson,
    write_heatmap_png,
    write_heatmap_tiff,
)
from histopipe.reports.top_patches import write_top_patches
from histopipe.slides.slide_files import open_slide
from histopipe.store.reading import decode_picture
from histopipe.store.store import Store
from histopipe.tasks.predictions import Predictions


def heat_of(
    corners: list[tuple[int, int]], values: list[float], side: float, **attributes: Any
) -> NamedPatchValues:
    x, y = (np.array([c[i] for c in corners], np.int64) for i in (0, 1))
    names = np.array(["b" if v >= 0.5 else "a" for v in values], object)
    bounds = list(attributes.get("bounds", (0, 0, 640, 480)))
    slide = PredictedSlide(
        slide="s",
        patient="s",
        label=None,
        width=bounds[0] + bounds[2],
        height=bounds[1] + bounds[3],
        bounds=bounds,
        mpp=attributes.get("mpp", 0.5),
        mpp_source=None,
        size_l0=side,
        stride_l0=side,
        source="",
    )
    numbers = np.array(values, np.float32)
    return NamedPatchValues(slide, "probability of b", x, y, numbers, predicted=names)


CELLS = st.lists(
    st.tuples(st.integers(-10, 90), st.integers(-10, 60), st.floats(0, 1)), min_size=1, max_size=12
)


def test_slide_is_found_by_id_with_or_without_the_uuid_of_its_store(tmp_path: Path) -> None:
    names = ("a", "a@20x", "b@")
    paths = [a_store(tmp_path / f"{n}.lmdb", {name: [] for name in names}) for n in range(2)]
    with Store(paths[0]) as first, Store(paths[1]) as second:
        for number, name in enumerate(names):
            assert find_slide([first, second], name) == (first, number)
            for store in (first, second):
                assert find_slide([first, second], f"{name}@{store.uuid[:8]}") == (store, number)
        assert find_slide([first, second], "a@10x") is None


@given(CELLS, st.floats(3, 40), st.floats(0.7, 9))
@examples(60)
def test_pixel_is_the_mean_of_the_patches_that_cover_it(
    cells: list[tuple[int, int, float]], side: float, pixel: float
) -> None:
    heat = heat_of([c[:2] for c in cells], [c[2] for c in cells], side, bounds=(5, 3, 80, 50))
    raster = heat.raster(pixel)
    assert raster.shape == (round(50 / pixel), round(80 / pixel))
    for (row, column), value in np.ndenumerate(raster):
        x, y = 5 + (column + 0.5) * pixel, 3 + (row + 0.5) * pixel
        # Centres on an edge may be on either side after rounding.
        near = [
            min(abs(x - left), abs(x - left - side), abs(y - top), abs(y - top - side))
            for left, top, _ in cells
        ]
        if min(near) >= 1e-6:
            over = [
                v for left, top, v in cells if left <= x < left + side and top <= y < top + side
            ]
            expected = np.mean(over) if over else np.nan
            assert value == pytest.approx(expected, abs=1e-4, nan_ok=True)


def test_ranks() -> None:
    assert ranks_of(np.array([3.0, 1.0, 2.0])).tolist() == [1, 0, 0.5]
    assert ranks_of(np.array([1.0, 1.0, 9.0])).tolist() == [0, 0, 1]
    assert ranks_of(np.array([5.0])).tolist() == [1]


def test_scale_bar_is_a_round_number() -> None:
    assert [scale_bar_um(most) for most in (1, 1.9, 2, 4.9, 50, 330, 12_000)] == [
        1,
        1,
        2,
        2,
        50,
        200,
        10_000,
    ]


def test_tiff_opens_as_a_slide_with_the_same_scale(tmp_path: Path) -> None:
    corners = [(x, y) for y in range(100, 4100, 64) for x in range(200, 8200, 64)]
    values = [(i % 101) / 100 for i in range(len(corners))]
    heat = heat_of(corners, values, 64, bounds=(100, 50, 9000, 5000), mpp=0.25)
    write_heatmap_tiff(heat, tmp_path / "heat.tiff")
    with open_slide(tmp_path / "heat.tiff") as slide:
        info = slide.info
        assert float(info.mpp_x or 0) == pytest.approx(1.0)
        sizes = [level.size for level in info.levels]
        assert sizes[:2] == [Size(2250, 1250), Size(1125, 625)] and len(sizes) == 5
        pixels = slide.read_region(PointL0(0, 0), 0, info.size)
    for (x, y), value in list(zip(corners, values, strict=True))[::37]:
        middle = pixels[(y - 50 + 32) // 4, (x - 100 + 32) // 4]
        expected = np.array(colormaps["viridis"](value)[:3]) * 255
        assert np.abs(middle - expected).max() <= 4
    assert (pixels[:12] == 255).all(), "above the first patch"
    # That of a small slide, of five by four patches, is no stamp.
    corners = [(512 * x, 512 * y) for y in range(4) for x in range(5)]
    heat = heat_of(corners, [0.5] * 20, 512, bounds=(0, 0, 2560, 2048))
    write_heatmap_tiff(heat, tmp_path / "small.tiff")
    with TiffFile(tmp_path / "small.tiff") as file:  # 2.5 pixels of level 0 per pixel
        assert file.pages[0].shape[:2] == (819, 1024)


def test_geojson_objects_have_the_positions_of_patches(tmp_path: Path) -> None:
    corners = [(200, 200), (264, 200), (328, 200), (500, 400), (600, 100)]
    heat = heat_of(corners, [0.9, 0.8, 0.2, 0.7, 0.1], 64, bounds=(100, 50, 600, 500))
    path = tmp_path / "heat.geojson"
    write_heatmap_geojson(heat, path, objects="cells", threshold=0.5)
    features = json.loads(path.read_text())["features"]
    assert features[0]["geometry"]["coordinates"][0][0] == [100, 150], "relative to the bounds"
    names = [feature["properties"]["classification"]["name"] for feature in features]
    assert names == ["b", "b", "a", "b", "a"]
    assert features[1]["properties"]["measurements"]["probability of b"] == pytest.approx(0.8)
    write_heatmap_geojson(heat, path, objects="contours", threshold=0.5)
    outlines = read_annotations(path)
    assert not outlines.notes
    areas = sorted((entry.area for entry in outlines.entries), key=lambda area: float(area.area))
    expected = [shapely.box(400, 350, 464, 414), shapely.box(100, 150, 228, 214)]
    assert [a.equals(b) for a, b in zip(areas, expected, strict=True)] == [True, True]
    features = json.loads(path.read_text())["features"]
    measured = {m["patches"]: m for m in (f["properties"]["measurements"] for f in features)}
    assert measured.keys() == {1, 2}
    assert measured[2]["mean probability of b"] == pytest.approx(0.85)


@pytest.mark.parametrize("objects", ["cells", "contours"])
def test_geojson_has_the_form_of_exports_of_qupath(
    data: Path, tmp_path: Path, objects: Any
) -> None:
    """Every value of a patch is a measurement, in its own units."""
    exported = json.loads((data / "annotations" / "qupath-unclassified.geojson").read_text())
    heat = heat_of([(200, 200), (264, 200)], [0.9, 0.2], 64, bounds=(100, 50, 600, 500))
    contributions = np.array([-3.5, 12.25], np.float32)
    heat = replace(heat, measures={"attention": heat.values, "contribution to b": contributions})
    write_heatmap_geojson(heat, tmp_path / "heat.geojson", objects=objects)
    drawn = json.loads((tmp_path / "heat.geojson").read_text())
    assert drawn["type"] == exported["type"]
    example = exported["features"][0]
    for feature in drawn["features"]:
        assert feature.keys() <= example.keys() and feature["type"] == example["type"]
        assert feature["geometry"].keys() == example["geometry"].keys()
        assert shapely.from_geojson(json.dumps(feature["geometry"])).is_valid
        assert "objectType" in feature["properties"] and "objectType" in example["properties"]
    if objects == "cells":
        measured = [feature["properties"]["measurements"] for feature in drawn["features"]]
        assert [each["contribution to b"] for each in measured] == [-3.5, 12.25]


def test_png_shows_the_slide_with_its_patches(tmp_path: Path) -> None:
    """Over a pink slide, the colours of the values are those over its grey."""
    background = np.full((48, 64, 3), (230, 120, 170), np.uint8)
    heat = heat_of([(0, 0), (320, 240)], [1.0, 0.0], 64)
    write_heatmap_png(heat, background, tmp_path / "heat.png")
    grey = 255 - 0.7 * (255 - (0.299 * 230 + 0.587 * 120 + 0.114 * 170))
    pixels = np.asarray(Image.open(tmp_path / "heat.png").convert("RGB")).astype(int)
    for value in (1.0, 0.0):
        over = 0.55 * 255 * np.array(colormaps["viridis"](value)[:3]) + 0.45 * grey
        assert (np.abs(pixels - over).max(axis=2) < 4).mean() > 0.004
    write_heatmap_png(heat_of([(0, 0)], [1.0], 64, mpp=None), None, tmp_path / "heat.png")
    assert [path.name for path in tmp_path.iterdir()] == ["heat.png"]


def test_small_slides_are_drawn_from_their_patches(
    made_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "histopipe.predictions.patch_values"
    with Store(made_store) as store:
        number, record = next(iter(store.complete.items()))
        thumbnail = decode_picture(store.thumbnail(number) or b"", "thumbnail")
        images = SlideImages({}, [store])
        monkeypatch.setattr(f"{limits}._SMALL_SIDE", max(thumbnail.shape))
        np.testing.assert_array_equal(images.of(record.id), thumbnail)
        monkeypatch.setattr(f"{limits}._SMALL_SIDE", 1e6)
        drawn = images.of(record.id)
        assert drawn is not None and max(drawn.shape) == 1600
        scale, index = 1600 / max(record.width, record.height), store.index(number)
        side = int((record.read_size or 0) * (record.downsample or 0) * scale)
        for row in range(0, record.planned, 7):
            x, y = (round(int(index[name][row]) * scale) for name in ("x_l0", "y_l0"))
            there = drawn[y : y + side, x : x + side].mean((0, 1))
            assert np.abs(there - store.read(record.id, row).mean((0, 1))).max() < 3
        monkeypatch.setattr(f"{limits}._SMALL_PATCHES", record.stored - 1)
        np.testing.assert_array_equal(images.of(record.id), thumbnail)


def test_top_patches_are_those_with_the_highest_and_lowest_values(
    made: Path, made_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the pixels of the store, and from the slide nearly the same."""
    with Store(made_store) as store:
        number, record = next(iter(store.complete.items()))
        index, images = store.index(number), SlideImages({}, [store])
        rng = np.random.default_rng(1)
        measures = {
            "attention": rng.random(record.planned),
            "contribution to a/b": rng.normal(size=record.planned),
            "contribution to c": 1 + rng.random(record.planned),
        }
        values = NamedPatchValues(
            PredictedSlide.of(record, source=""),
            "attention",
            index["x_l0"].astype(np.int64),
            index["y_l0"].astype(np.int64),
            measures["attention"].astype(np.float32),
            measures=measures,
        )
        for count in (5, 4):
            files = write_top_patches(values, images, tmp_path, count)
        assert [file.name for file in files] == [f"{record.id}.top.csv", f"{record.id}.top.png"]
        rows = csv_rows(files[0])
        assert Counter((row["measure"], row["end"]) for row in rows) == {
            ("contribution to a/b", "highest"): 4,
            ("contribution to a/b", "lowest"): 4,
            ("contribution to c", "highest"): 4,  # none lowers it
        }
        for row in rows:
            order = np.argsort(measures[row["measure"]])
            place = int(row["rank"]) - 1
            patch = int(order[place] if row["end"] == "lowest" else order[::-1][place])
            assert float(row["value"]) == pytest.approx(measures[row["measure"]][patch])
            for name in ("x_l0", "y_l0"):
                assert int(row[name]) == index[name][patch]
            pixels = np.asarray(Image.open(tmp_path / row["file"]))
            assert np.array_equal(pixels, store.read(record.id, patch))
        assert len(list((tmp_path / f"{record.id}.top").iterdir())) == 12
        x, y = (int(index[name][3]) for name in ("x_l0", "y_l0"))
        slide = SlideImages({record.id: made / f"{record.id}.svs"}, [])
        from_file = slide.patch(record.id, x, y, record.side_l0)
        assert from_file is not None
        difference = from_file.mean((0, 1)) - store.read(record.id, 3).mean((0, 1))
        assert np.abs(difference).max() < 3
        other_size = replace(values, slide=replace(values.slide, size_l0=2 * record.side_l0))
        nothing = write_top_patches(other_size, images, tmp_path, 2)
        assert [file.suffix for file in nothing] == [".csv"]  # these patches are not in the store
        assert "no image of the patches found" in capsys.readouterr().err
        assert not list(tmp_path.rglob("*.png"))


def test_settings_of_matplotlib_change_no_picture(tmp_path: Path) -> None:
    def pictures() -> tuple[bytes, str]:
        write_heatmap_png(heat_of([(0, 0)], [1.0], 64), None, tmp_path / "heat.png")
        curve = lines("loss", [1, 2], {"train": [0.5, 0.4]}, x="epoch", y="loss")
        return (tmp_path / "heat.png").read_bytes(), re.sub(r"\b[mp][0-9a-f]{10}\b", "id", curve)

    before = pictures()
    user: Any = {
        "image.origin": "lower",
        "text.usetex": True,
        "savefig.bbox": "tight",
        "font.size": 30,
    }
    with rc_context(user):
        assert pictures() == before
        assert all(rcParams[name] == user[name] for name in user)


# The command


def scores_of_slide(slide: str, count: int, **attributes: Any) -> Predictions:
    zeros = np.zeros(count, np.int32)
    values = np.linspace(0, 1, count, dtype=np.float32)
    return class_predictions(
        ("n", "t"),
        (slide,),
        (slide,),
        slide=zeros,
        patient=zeros,
        x_l0=64 * np.arange(count),
        y_l0=np.zeros(count, np.int64),
        label=zeros - 1,
        probability=np.stack([1 - values, values], axis=1),
        **attributes,
    )


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    """A folder of predictions of three slides: one in a sub-folder, and one without patches."""
    folder = PredictionsFolder(tmp_path / "predictions")
    for name, count in (("x/one", 9), ("two", 4), ("empty", 0)):
        description = PredictedSlide(
            slide=name,
            patient=name,
            label=None,
            width=640,
            height=64,
            bounds=[0, 0, 640, 64],
            mpp=0.5,
            mpp_source=None,
            size_l0=64.0,
            stride_l0=64.0,
            source="",
            patches=count,
        )
        folder.write(description, scores_of_slide(name, count))
    (folder.folder / "predict.json").write_text("{}")
    return folder.folder


def test_all_formats_are_written_for_all_slides(
    predictions: Path, tmp_path: Path, run: RunCommand
) -> None:
    """Files that are named after the slides are not overwritten."""
    folder = tmp_path / "heatmaps"
    folder.mkdir()
    of_user = [folder / f"two.{suffix}" for suffix in ("tiff", "geojson", "png")]
    for path in of_user:
        path.write_text("mine")
    done = run("heatmap", predictions, "--to", "png,tiff,geojson", "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["files"]) == {"x/one", "two"}
    assert "two: no image of the slide found" in done.stderr
    assert {path.read_text() for path in of_user} == {"mine"}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*.heat.*")}
    assert files == {f"{s}.heat.{k}" for s in ("x/one", "two") for k in ("png", "tiff", "geojson")}
    for label, values in (("t", [0, 1 / 3, 2 / 3, 1]), ("n", [1, 2 / 3, 1 / 3, 0])):
        flags = ("--class", label, "--slide", "two", "--to", "geojson", "--out", label)
        done = run("heatmap", predictions, *flags)
        assert done.returncode == 0, done.stderr
        (path,) = (tmp_path / label).iterdir()
        features = json.loads(path.read_text())["features"]
        measured = [f["properties"]["measurements"][f"probability of {label}"] for f in features]
        assert path.name == "two.heat.geojson" and measured == pytest.approx(values, abs=1e-6)


def test_errors_of_heatmap(predictions: Path, tmp_path: Path, run: RunCommand) -> None:
    def check(code: int, message: str, *arguments: object) -> None:
        done = run("heatmap", *arguments)
        assert (done.returncode, message in done.stderr + done.stdout) == (code, True), done.stderr

    check(2, "holds no predictions", tmp_path / "nothing")
    for message, *flags in (
        ("--class: found 'x', expected n or t", "--class", "x"),
        ("has no predictions of slide 'three': expected such as", "--slide", "three"),
        ("--to: found ('jpeg',), expected a list, each item 'png'", "--to", "jpeg"),
        ("--threshold", "--threshold", "2"),
    ):
        check(2, message, predictions, *flags)
    description = predictions / "patches" / "two.json"
    description.write_text(description.read_text().replace('"size_l0": 64.0', '"size_l0": 0'))
    message = "two: failed: slide two: the side of its patches is unknown"
    check(4, message, predictions, "--slide", "two")
    check(3, message, predictions)  # a damaged slide does not affect other slides
    assert (tmp_path / "heatmaps" / "x" / "one.heat.png").exists()
    description.write_text("{")
    check(0, "1 file of 1 slide", predictions, "--slide", "x/one")
    check(3, "two.json is damaged", predictions)


def test_slides_of_a_run_without_size_or_store_are_refused(
    small_store: Path, tmp_path: Path, run: RunCommand
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    sides = [({"split": side}, scores_of_slide("n0", 3)) for side in ("validation", "test")]
    write_predictions(folder / "predictions.csv", sides)
    for config, message in (
        (f'stores = ["{small_store}"]\n', "slide n0: the side of its patches is unknown"),
        ("", "no store holds slide n0: found no store; name the store"),
    ):
        (folder / "config.toml").write_text(config)
        done = run("heatmap", folder)
        assert (done.returncode, message in done.stderr) == (4, True), done.stderr
    (folder / "splits").mkdir()
    done = run("heatmap", folder)
    assert (done.returncode, "is a cross-validation" in done.stderr) == (2, True)


def test_attention_is_drawn_by_rank(made_store: Path, tmp_path: Path, run: RunCommand) -> None:
    folder = tmp_path / "run" / "attention"
    folder.mkdir(parents=True)
    with Store(made_store) as store:
        record, index = next(iter(store.complete.values())), store.index(0)
    rows = ["slide,x_l0,y_l0,size_l0,attention"]
    shares = np.geomspace(1e-6, 0.1, record.planned)
    for x, y, share in zip(index["x_l0"], index["y_l0"], shares, strict=True):
        rows.append(f"{record.id},{x},{y},128,{share}")
    (folder / "bag.csv").write_text("\n".join(rows))
    done = run("heatmap", tmp_path / "run", "--store", made_store, "--to", "geojson")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "heatmaps" / f"{record.id}.heat.geojson"
    features = json.loads(path.read_text())["features"]
    values = [next(iter(f["properties"]["measurements"].values())) for f in features]
    assert values == pytest.approx(np.linspace(0, 1, record.planned).tolist())


def test_heatmap_says_why_a_store_of_the_run_is_not_used(
    trained: Path, made_store: Path, tmp_path: Path, run: RunCommand
) -> None:
    """The store that the run names is damaged, and its slides have no other place."""
    broken = tmp_path / "broken.lmdb"
    broken.mkdir()
    (broken / "data.mdb").write_bytes(b"no store")
    copied = Path(shutil.copytree(trained, tmp_path / "run"))
    config = copied / "config.toml"
    config.write_text(config.read_text().replace(str(made_store), str(broken)))
    done = run("heatmap", copied, "--out", tmp_path / "heatmaps")
    assert done.returncode == 4
    assert f"warning: {broken}" in done.stderr and "no store holds slide" in done.stderr
