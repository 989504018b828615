"""Test heatmaps: pixels equal a slow reference, files can be read back, and errors are reported."""

from __future__ import annotations

import csv
import json
import re
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

from helpers.commands import Run
from helpers.examples import examples
from helpers.scores import class_predictions
from helpers.stores import a_store, jpegs
from helpers.trainings import csv_rows
from histopipe.annotations.annotation_files import read_annotations
from histopipe.geometry import PointL0
from histopipe.predictions.prediction_tables import ranks_of, write_predictions
from histopipe.predictions.sources import PredictedSlide, PredictionsFolder
from histopipe.reports.charts import lines
from histopipe.reports.heatmap import (
    coloured,
    scale_bar_um,
    write_heatmap_geojson,
    write_heatmap_png,
    write_heatmap_tiff,
)
from histopipe.reports.heatmap_values import NamedPatchValues, SlideImages, find_slide
from histopipe.reports.top_patches import write_top_patches
from histopipe.slides.readers import open_slide
from histopipe.splits.splitting import make_splits
from histopipe.store.reading import decode_picture
from histopipe.store.store import Store
from histopipe.tasks.task import Predictions


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
        stores = [first, second]
        for number, name in enumerate(names):
            assert find_slide(stores, name) == (first, number)
            for store in stores:
                assert find_slide(stores, f"{name}@{store.uuid[:8]}") == (store, number)
        assert find_slide(stores, "a@10x") is None


@given(CELLS, st.floats(3, 40), st.floats(0.7, 9))
@examples(60)
def test_pixel_is_the_mean_of_the_patches_that_cover_it(
    cells: list[tuple[int, int, float]], side: float, pixel: float
) -> None:
    heat = heat_of([c[:2] for c in cells], [c[2] for c in cells], side, bounds=(5, 3, 80, 50))
    raster = heat.raster(pixel)
    assert raster.shape == (round(50 / pixel), round(80 / pixel))
    assert raster.dtype == np.float32
    for row in range(raster.shape[0]):
        for column in range(raster.shape[1]):
            x, y = 5 + (column + 0.5) * pixel, 3 + (row + 0.5) * pixel
            # Centres on an edge may be on either side after rounding.
            near = [
                min(abs(x - left), abs(x - left - side), abs(y - top), abs(y - top - side))
                for left, top, _ in cells
            ]
            if min(near) < 1e-6:
                continue
            over = [
                v for left, top, v in cells if left <= x < left + side and top <= y < top + side
            ]
            expected = np.mean(over) if over else np.nan
            assert raster[row, column] == pytest.approx(expected, abs=1e-4, nan_ok=True)


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
        assert info.vendor == "generic-tiff"
        assert float(info.mpp_x or 0) == pytest.approx(1.0)
        assert [(level.size.width, level.size.height) for level in info.levels][:2] == [
            (2250, 1250),
            (1125, 625),
        ]
        assert len(info.levels) == 5
        pixels = slide.read_region(PointL0(0, 0), 0, info.size)
    for (x, y), value in list(zip(corners, values, strict=True))[::37]:
        middle = pixels[(y - 50 + 32) // 4, (x - 100 + 32) // 4]
        expected = np.array(colormaps["viridis"](value)[:3]) * 255
        assert np.abs(middle - expected).max() <= 4
    assert (pixels[:12] == 255).all(), "above the first patch"
    assert (coloured(np.full((2, 2), np.nan, np.float32)) == 255).all()
    # That of a small slide, of five by four patches, is no stamp.
    corners = [(512 * x, 512 * y) for y in range(4) for x in range(5)]
    heat = heat_of(corners, [0.5] * 20, 512, bounds=(0, 0, 2560, 2048))
    write_heatmap_tiff(heat, tmp_path / "small.tiff")
    with TiffFile(tmp_path / "small.tiff") as file:  # 2.5 pixels of level 0 per pixel
        assert file.pages[0].shape[:2] == (819, 1024)


def test_geojson_objects_have_the_positions_of_patches(tmp_path: Path) -> None:
    corners = [(200, 200), (264, 200), (328, 200), (500, 400), (600, 100)]
    heat = heat_of(corners, [0.9, 0.8, 0.2, 0.7, 0.1], 64, bounds=(100, 50, 600, 500))
    path = tmp_path / "cells.geojson"
    write_heatmap_geojson(heat, path, objects="cells", threshold=0.5)
    features = json.loads(path.read_text())["features"]
    assert features[0]["geometry"]["coordinates"][0][0] == [100, 150], "relative to the bounds"
    assert [f["properties"]["classification"]["name"] for f in features] == [
        "b",
        "b",
        "a",
        "b",
        "a",
    ]
    assert features[1]["properties"]["measurements"]["probability of b"] == pytest.approx(0.8)
    path = tmp_path / "contours.geojson"
    write_heatmap_geojson(heat, path, objects="contours", threshold=0.5)
    outlines = read_annotations(path)
    assert not outlines.notes
    areas = sorted(
        (outline.area for outline in outlines.entries), key=lambda area: float(area.area)
    )
    expected = [shapely.box(400, 350, 464, 414), shapely.box(100, 150, 228, 214)]
    assert all(
        a.equals_exact(b, 1e-6, normalize=True) or a.equals(b)
        for a, b in zip(areas, expected, strict=True)
    )
    measured = [f["properties"]["measurements"] for f in json.loads(path.read_text())["features"]]
    assert sorted(measurements["patches"] for measurements in measured) == [1, 2]
    assert max(measurements["mean probability of b"] for measurements in measured) == pytest.approx(
        0.85
    )


def test_geojson_has_the_form_of_exports_of_qupath(data: Path, tmp_path: Path) -> None:
    """Every value of a patch is a measurement, in its own units."""
    exported = json.loads((data / "annotations" / "qupath-unclassified.geojson").read_text())
    heat = heat_of([(200, 200), (264, 200)], [0.9, 0.2], 64, bounds=(100, 50, 600, 500))
    contributions = np.array([-3.5, 12.25], np.float32)
    heat = replace(heat, measures={"attention": heat.values, "contribution to b": contributions})
    for objects in ("cells", "contours"):
        write_heatmap_geojson(heat, tmp_path / "heat.geojson", objects=objects)
        drawn = json.loads((tmp_path / "heat.geojson").read_text())
        assert drawn["type"] == exported["type"]
        example = exported["features"][0]
        for feature in drawn["features"]:
            assert feature.keys() <= example.keys()
            assert feature["type"] == example["type"]
            assert feature["geometry"].keys() == example["geometry"].keys()
            assert shapely.from_geojson(json.dumps(feature["geometry"])).is_valid
            assert "objectType" in feature["properties"] and "objectType" in example["properties"]
        if objects == "cells":
            measured = [feature["properties"]["measurements"] for feature in drawn["features"]]
            assert [each["contribution to b"] for each in measured] == [-3.5, 12.25]


def test_png_shows_the_slide_with_its_patches(tmp_path: Path) -> None:
    """Over a pink slide, the colours of the values are those over its grey."""
    background = np.full((48, 64, 3), (230, 120, 170), np.uint8)
    write_heatmap_png(
        heat_of([(0, 0), (320, 240)], [1.0, 0.0], 64), background, tmp_path / "heat.png"
    )
    grey = 255 - 0.7 * (255 - (0.299 * 230 + 0.587 * 120 + 0.114 * 170))
    with Image.open(tmp_path / "heat.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    yellow, purple = (np.array(colormaps["viridis"](v)[:3]) * 255 for v in (1.0, 0.0))
    for colour in (yellow, purple):
        over = 0.55 * colour + 0.45 * grey
        assert (np.abs(pixels - over).max(axis=2) < 4).mean() > 0.004
    write_heatmap_png(heat_of([(0, 0)], [1.0], 64, mpp=None), None, tmp_path / "without.png")
    assert (tmp_path / "without.png").stat().st_size > 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["heat.png", "without.png"]


def test_small_slides_are_drawn_from_their_patches(
    made_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(made_store) as store:
        number, record = next(iter(store.complete.items()))
        thumbnail = decode_picture(store.thumbnail(number) or b"", "thumbnail")
        images = SlideImages({}, [store])
        monkeypatch.setattr("histopipe.reports.heatmap_values._SMALL_SIDE", max(thumbnail.shape))
        small = images.of(record.id)
        assert small is not None and small.shape == thumbnail.shape
        monkeypatch.setattr("histopipe.reports.heatmap_values._SMALL_SIDE", 1e6)
        drawn = images.of(record.id)
        assert drawn is not None and max(drawn.shape) == 1600
        scale = 1600 / max(record.width, record.height)
        side = (record.read_size or 0) * (record.downsample or 0)
        index = store.index(number)
        for row in range(0, record.planned, 7):
            x, y = (round(int(index[name][row]) * scale) for name in ("x_l0", "y_l0"))
            there = drawn[y : y + int(side * scale), x : x + int(side * scale)]
            assert np.abs(there.mean((0, 1)) - store.read(record.id, row).mean((0, 1))).max() < 3
        monkeypatch.setattr("histopipe.reports.heatmap_values._SMALL_PATCHES", record.stored - 1)
        undrawn = images.of(record.id)
        assert undrawn is not None and np.array_equal(undrawn, thumbnail)


def test_top_patches_are_those_with_the_highest_and_lowest_values(
    made: Path, made_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the pixels of the store, and from the slide nearly the same."""
    with Store(made_store) as store:
        number, record = next(iter(store.complete.items()))
        index = store.index(number)
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
        write_top_patches(values, SlideImages({}, [store]), tmp_path, 5)
        files = write_top_patches(values, SlideImages({}, [store]), tmp_path, 4)
        assert [file.name for file in files] == [f"{record.id}.top.csv", f"{record.id}.top.png"]
        with files[0].open() as file:
            rows = list(csv.DictReader(file))
        ends = [(row["measure"], row["end"]) for row in rows]
        assert {end: ends.count(end) for end in ends} == {
            ("contribution to a/b", "highest"): 4,
            ("contribution to a/b", "lowest"): 4,
            ("contribution to c", "highest"): 4,  # none lowers it
        }
        for row in rows:
            ordered = np.sort(measures[row["measure"]])
            place = int(row["rank"]) - 1
            expected = ordered[place] if row["end"] == "lowest" else ordered[::-1][place]
            assert float(row["value"]) == pytest.approx(expected)
            patch = int(np.flatnonzero(measures[row["measure"]] == expected)[0])
            assert (int(row["x_l0"]), int(row["y_l0"])) == (
                index["x_l0"][patch],
                index["y_l0"][patch],
            )
            with Image.open(tmp_path / row["file"]) as image:
                assert np.array_equal(np.asarray(image), store.read(record.id, patch))
        assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*-*.png")} >= {
            row["file"] for row in rows
        }
        assert len(list((tmp_path / f"{record.id}.top").iterdir())) == 12
        slide = next(
            path for path in made.iterdir() if path.stem == record.id and path.suffix != ".geojson"
        )
        from_file = SlideImages({record.id: slide}, []).patch(
            record.id, int(index["x_l0"][3]), int(index["y_l0"][3]), record.side_l0
        )
        assert from_file is not None
        stored = store.read(record.id, 3).astype(float)
        assert np.abs(from_file.mean((0, 1)) - stored.mean((0, 1))).max() < 3
        other_size = replace(values, slide=replace(values.slide, size_l0=2 * record.side_l0))
        nothing = write_top_patches(other_size, SlideImages({}, [store]), tmp_path, 2)
        assert [file.suffix for file in nothing] == [".csv"]  # these patches are not in the store
        assert "no image of the patches found" in capsys.readouterr().err
        assert not list(tmp_path.rglob("*.png"))
        count = record.planned + 1
        write_top_patches(values, SlideImages({}, []), tmp_path / "all", count)
        ranks = [
            row["rank"]
            for row in csv_rows(tmp_path / "all" / f"{record.id}.top.csv")
            if row["measure"].endswith("c")
        ]
        assert len(ranks) == record.planned  # all of them raise it


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
    (folder.path / "predict.json").write_text("{}")
    return folder.path


def test_all_formats_are_written_for_all_slides(
    predictions: Path, tmp_path: Path, run: Run
) -> None:
    """Files that are named after the slides are not overwritten."""
    (tmp_path / "heatmaps").mkdir()
    of_user = [tmp_path / "heatmaps" / f"two.{suffix}" for suffix in ("tiff", "geojson", "png")]
    for path in of_user:
        path.write_text("mine")
    done = run("heatmap", predictions, "--to", "png,tiff,geojson", "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["files"]) == {"x/one", "two"}
    assert "two: no image of the slide found" in done.stderr
    assert {path.read_text() for path in of_user} == {"mine"}
    files = {
        str(p.relative_to(tmp_path / "heatmaps"))
        for p in (tmp_path / "heatmaps").rglob("*.*")
        if p not in of_user
    }
    assert files == {f"{s}.heat.{k}" for s in ("x/one", "two") for k in ("png", "tiff", "geojson")}
    features = json.loads((tmp_path / "heatmaps" / "two.heat.geojson").read_text())["features"]
    assert [round(f["properties"]["measurements"]["probability of t"], 3) for f in features] == [
        0,
        0.333,
        0.667,
        1,
    ]
    done = run(
        "heatmap", predictions, "--class", "n", "--slide", "two", "--to", "geojson", "--out", "n"
    )
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "n").iterdir()] == ["two.heat.geojson"]


def test_errors_of_heatmap(predictions: Path, tmp_path: Path, run: Run) -> None:
    def refused(code: int, message: str, *arguments: object) -> None:
        done = run("heatmap", *arguments)
        assert (done.returncode, message in done.stderr + done.stdout) == (code, True), done.stderr

    refused(2, "holds no predictions", tmp_path / "nothing")
    refused(2, "--class: found 'x', expected n or t", predictions, "--class", "x")
    refused(
        2, "has no predictions of slide 'three': expected such as", predictions, "--slide", "three"
    )
    refused(2, "--to: found jpeg", predictions, "--to", "jpeg")
    refused(2, "--threshold", predictions, "--threshold", "2")
    description = predictions / "patches" / "two.json"
    description.write_text(description.read_text().replace('"size_l0": 64.0', '"size_l0": 0'))
    refused(
        4,
        "two: failed: slide two: the size of the slide or of its patches",
        predictions,
        "--slide",
        "two",
    )
    done = run("heatmap", predictions)
    assert done.returncode == 3, "a damaged slide does not affect other slides"
    assert (tmp_path / "heatmaps" / "x" / "one.heat.png").exists()
    description.write_text("{")
    refused(0, "1 file of 1 slide", predictions, "--slide", "x/one")
    refused(3, "two.json is damaged", predictions)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return a_store(
        tmp_path / "patches.lmdb",
        {f"{'nt'[i % 2]}{i}": jpegs(0, 6, 32) for i in range(6)},
        patch_size=32,
    )


def test_validation_and_test_patches_of_a_run_are_drawn(
    store: Path, tmp_path: Path, run: Run
) -> None:
    """The slide has patches in both splits."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(f'stores = ["{store}"]\n')
    with Store(store) as opened:
        make_splits([opened], split_by="slide", seed=1)
    sides = [({"split": side}, scores_of_slide("n0", 3)) for side in ("validation", "test")]
    write_predictions(folder / "predictions.csv", sides)
    done = run("heatmap", folder)
    assert done.returncode == 4, "records of this store have no size"
    assert "slide n0: the size of the slide or of its patches" in done.stderr
    (folder / "config.toml").write_text("")
    done = run("heatmap", folder)
    assert done.returncode == 4
    assert "no store holds slide n0: found no store; name the store" in done.stderr
    (folder / "splits").mkdir()
    done = run("heatmap", folder)
    assert (done.returncode, "is a cross-validation" in done.stderr) == (2, True)


def test_attention_is_drawn_by_rank(made_store: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "run" / "attention"
    folder.mkdir(parents=True)
    with Store(made_store) as store:
        record = next(iter(store.complete.values()))
        index = store.index(0)
    shares = np.geomspace(1e-6, 1, record.planned)
    with (folder / "bag.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["slide", "x_l0", "y_l0", "size_l0", "attention"])
        for x, y, share in zip(index["x_l0"], index["y_l0"], shares / shares.sum(), strict=True):
            writer.writerow([record.id, x, y, 128, share])
    done = run("heatmap", tmp_path / "run", "--store", made_store, "--to", "png,geojson")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "heatmaps" / f"{record.id}.heat.geojson"
    features = json.loads(path.read_text())["features"]
    values = [next(iter(f["properties"]["measurements"].values())) for f in features]
    assert values == pytest.approx(np.linspace(0, 1, record.planned).tolist())
    assert (tmp_path / "heatmaps" / f"{record.id}.heat.png").exists()
