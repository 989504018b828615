"""Test the meaning of masks of other tools: which values are tissue, whether it is that of the slide, and its frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from tissue_scenes import scene

import histopipe
from helpers.stores import flip_bytes
from helpers.tissue_files import box, feature, read_mask, write_coords
from histopipe.errors import ExitCode, MaskUnfit, UsageError
from histopipe.geometry import Level, Mpp, PointL0, RegionL0, Size
from histopipe.predictions.patch_values import NamedPatchValues
from histopipe.predictions.sources import PredictedSlide
from histopipe.reports.heatmap import write_heatmap_geojson, write_heatmap_tiff
from histopipe.slides.slide import Turn
from histopipe.slides.thumbnail import Thumbnail
from histopipe.store.store import Store
from histopipe.store.writer import StoreWriter
from histopipe.system.output import Progress
from histopipe.tiling.finding import checked_mask, find_disagreement
from histopipe.tiling.mask import Grid, Mask, TissueMask, find_tissue_values
from histopipe.tiling.mask_files import MaskFile, read_mask_file, write_mask
from histopipe.tiling.spec import MaskRules

SILENT = Progress()
pytestmark = pytest.mark.usefixtures("inline_workers")


def drawn(seed: int) -> Mask:
    """Return a mask, (384, 512) bool, of some ellipses."""
    rng, mask = np.random.default_rng(seed), np.zeros((384, 512), np.uint8)
    for _ in range(rng.integers(1, 5)):
        centre, axes = rng.integers(60, 320, 2).tolist(), rng.integers(15, 90, 2).tolist()
        cv2.ellipse(mask, centre, axes, int(rng.integers(180)), 0, 360, 1, -1)
    return mask.view(np.bool_)


@given(st.integers(0, 999), st.integers(0, 3), st.sampled_from([1, 2, 100, 255]))
def test_two_values_are_glass_and_tissue(seed: int, smooth: int, tissue: int) -> None:
    """Also with smooth edges, and after compression by JPEG. Only the pixels of edges may differ."""
    truth = drawn(seed)
    values: np.ndarray[Any, Any] = truth.astype(np.float32) * tissue
    if smooth and tissue >= 100:
        values = cv2.GaussianBlur(values, (0, 0), smooth / 2)
        _, jpeg = cv2.imencode(".jpg", values, [cv2.IMWRITE_JPEG_QUALITY, 90])
        values = np.asarray(cv2.imdecode(jpeg, cv2.IMREAD_GRAYSCALE))
    mask = find_tissue_values(Image.fromarray(values.astype(np.uint8)), None)
    wide = Image.fromarray(values.astype(np.uint16) * 257)
    assert (find_tissue_values(wide, None) == mask).all()
    if tissue == 255:
        for colour in ((0, 0, 255), (0, 128, 255), (130, 0, 255)):
            parts = np.rint(values[..., None] * (np.array(colour) / 255)).astype(np.uint8)
            coloured = find_tissue_values(Image.fromarray(parts), None) if smooth == 0 else mask
            assert (coloured == mask).all()
    edge = cv2.morphologyEx(truth.view(np.uint8), cv2.MORPH_GRADIENT, np.ones((5, 5)))
    assert not ((mask != truth) & (edge == 0)).any()


def classes(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return classes 0, 1 and 2 in areas, (384, 512)."""
    return np.where(drawn(seed + 1), 2, drawn(seed).astype(np.uint8)).astype(np.uint8)


def smooth(numbers: np.ndarray[Any, Any], colours: Any) -> np.ndarray[Any, Any]:
    """Return the colours of classes, with smooth edges."""
    return np.asarray(cv2.GaussianBlur(np.array(colours, np.uint8)[numbers], (0, 0), 0.8))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (classes(1), "areas of the values 0, 1, 2"),
        (classes(1) * 127, "areas of the values 0, 127, 254"),
        (
            classes(1)[..., None] * np.array([0, 60, 100], np.uint8),
            "areas of the values #000000, #003c64, #0078c8",
        ),
        (drawn(1).astype(np.uint8) + 1, "areas of the values 1, 2"),
        (np.where(drawn(1), 255, 1), "areas of the values 1, 255"),
        (smooth(classes(1), [(255, 255, 255), (255, 0, 0), (255, 255, 0)]), "#ff0000"),
        (smooth(classes(1), [(0, 0, 0), (255, 0, 0), (0, 255, 0)]), "#00ff00, #ff0000"),
        (smooth(drawn(1) * 1, [(255, 255, 255), (255, 0, 0)]), "#ff0000, #ffffff"),
        (smooth(classes(1), [0, 10, 255]), "areas of the values 0, 10, 255"),
        (smooth(classes(1), [0, 5, 255]), "areas of the values 0, 5, 255"),
        (smooth(classes(1), [0, 1, 255]), "areas of the values 0, 1, 255"),
        (smooth(classes(1), [0, 100, 102]), "areas of the values 0, 100, 102"),
        (cv2.GaussianBlur(drawn(1) * np.float32(60), (0, 0), 60), "of other values|areas of"),
        (np.where(drawn(1), np.arange(512) % 97 // 2, 0), "of other values"),
        (drawn(1) * np.random.default_rng(0).integers(30, 255, (384, 512)), "of other values"),
        (cv2.cvtColor(scene("h&e", 0)[0], cv2.COLOR_RGB2GRAY), "of other values"),
        (cv2.GaussianBlur(drawn(1) * np.float32(255), (0, 0), 40), "values"),
        (np.random.default_rng(0).integers(0, 256, (384, 512)), "areas of the values none"),
        (np.pad(drawn(1)[:20, :20] * 0, 4, constant_values=0) + np.eye(28) * 3, "no pixel"),
    ],
)
def test_masks_without_a_single_meaning_are_refused(
    tmp_path: Path, values: np.ndarray[Any, Any], message: str
) -> None:
    image = Image.fromarray(values.astype(np.uint8))
    if message == "no pixel":  # a few scattered pixels are tissue
        assert (find_tissue_values(image, None) == (values > 0)).all()
        return
    with pytest.raises(ValueError, match=message):
        find_tissue_values(image, None)
    image.save(tmp_path / "a.png")
    grid = Grid(0, 0, 4.0, Size(512, 384), Size(2048, 1536))
    bounds = RegionL0(PointL0(0, 0), grid.slide)
    with pytest.raises(MaskUnfit, match="name what is tissue: --tissue-values"):
        read_mask(tmp_path / "a.png", "a", grid, bounds)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2", [2]),
        ("0", [0]),
        ("1,2", [1, 2]),
        ("1-2", [1, 2]),
        (" 1 , 2-9", [1, 2]),
        ("0,2", [0, 2]),
    ],
)
def test_values_that_are_named(text: str, numbers: list[int]) -> None:
    values = classes(1)
    expected = np.isin(values, numbers)
    colours = [0, 0, 0, 255, 0, 0, 0, 200, 0]
    palette = Image.fromarray(values)
    palette.putpalette(colours)
    for image in (Image.fromarray(values), Image.fromarray(values.astype(np.uint16))):
        assert (find_tissue_values(image, text) == expected).all()
    table = np.array(colours, np.uint8).reshape(-1, 3)
    names = ",".join("#{:02X}{:02x}{:02x}".format(*table[number]) for number in numbers)
    for image in (palette, Image.fromarray(table[values])):
        assert (find_tissue_values(image, names) == expected).all()
    with pytest.raises(ValueError, match="no pixel of --tissue-values 77, but 0, 1, 2"):
        find_tissue_values(Image.fromarray(values), "77")


@pytest.mark.parametrize("text", ["", "tissue", "1;2", "-1", "#ff00", "3-", "1,,2", "9-3"])
def test_other_forms_of_values_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--tissue-values: found"):
        MaskRules(tissue_values=text or " ")


CONDITIONS = ("h&e", "pale", "fat", "faint ihc", "tinted", "border", "pen", "biopsy")


def thumbnail_of(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Thumbnail:
    size = Size(pixels.shape[1] * 16, pixels.shape[0] * 16)
    return Thumbnail(pixels, Level(0, size, 1.0), 0, 0, 16, Mpp(8.0))


def judged(pixels: np.ndarray[Any, Any], mask: Mask, check: Any = "fail") -> TissueMask:
    return checked_mask(MaskFile({"stored": mask}, False), thumbnail_of(pixels), check, "the mask")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_masks_of_other_tissue_are_found(condition: str, seed: int) -> None:
    """Inverted, mirrored away from the tissue; a region of interest and loose outlines are right."""
    pixels, tissue = scene(condition, seed)
    assert (judged(pixels, tissue).pixels == tissue).all()
    with pytest.raises(MaskUnfit, match=r"the mask takes glass and leaves tissue: \d+% of it is"):
        judged(pixels, ~tissue)
    elsewhere = np.roll(tissue, tissue.shape[1] // 2, axis=1) & ~tissue
    with pytest.raises(MaskUnfit, match="--tissue-check warn uses it"):
        judged(pixels, elsewhere)
    (note,) = judged(pixels, ~tissue, "warn").notes
    assert note.startswith("its mask takes glass and leaves tissue")
    assert judged(pixels, ~tissue, "off").notes == ()
    # A part of the largest piece, with a margin as wide as the part.
    *_, stats, _ = cv2.connectedComponentsWithStats(tissue.view(np.uint8))
    x, y, width, height, _ = stats[1 + stats[1:, 4].argmax()].tolist()
    for side in (12, 40, 2000):
        region = np.zeros_like(tissue)
        region[max(0, y - side) : y + height + side, max(0, x - side) : x + width + side] = True
        judged(pixels, region & tissue if side == 40 else region)


def test_masks_that_cannot_be_compared_are_used_with_a_note() -> None:
    full, inverted = scene("full h&e", 0)[0], np.zeros((720, 960), np.bool_)
    inverted[:, :100] = True
    assert judged(full, inverted).notes[0].startswith("its mask was not compared: no glass found")
    assert judged(scene("fluorescence", 0)[0], inverted).notes == (
        "its mask was not compared: fluorescence",
    )
    blank = scene("blank", 0)[0]
    assert judged(blank, inverted).notes == ("its mask was not compared: otsu-3 finds no tissue",)
    ours = checked_mask(
        MaskFile({"turned": inverted}, True), thumbnail_of(scene("h&e", 0)[0]), "fail", "x"
    )
    assert (ours.pixels == inverted).all() and ours.notes == ("its mask is ours: not compared",)
    assert not find_disagreement(inverted, np.zeros_like(inverted))  # no tissue is left


def test_a_slide_with_an_inverted_mask_fails(tmp_path: Path) -> None:
    """By each command that reads masks; a complete slide is not judged again."""
    pixels, tissue = scene("h&e", 0)
    slides, masks = tmp_path / "slides", tmp_path / "masks"
    slides.mkdir()
    masks.mkdir()
    Image.fromarray(pixels).save(slides / "a.png", dpi=(25400 / 8, 25400 / 8))
    Image.fromarray(~tissue).save(masks / "a.png")
    settings: dict[str, Any] = {"progress": SILENT, "tissue": masks}
    tiling: dict[str, Any] = {**settings, "patch_size": 64, "level": 0}
    plan = histopipe.plan(slides, tmp_path / "s.lmdb", **tiling)
    assert "takes glass and leaves tissue" in plan.slides[0].reason
    report = histopipe.ingest(slides, tmp_path / "s.lmdb", **tiling)
    assert report.exit_code == ExitCode.NOTHING and "takes glass" in report.failed["a"]
    written = histopipe.tissue(slides, tmp_path / "out", tissue_check="warn", **settings)
    assert "takes glass" in written.slides[0].notes[-1]
    tiling["tissue_values"] = "0"
    right = histopipe.ingest(slides, tmp_path / "right.lmdb", **tiling)
    assert right.exit_code == ExitCode.DONE
    with Store(tmp_path / "right.lmdb") as store:
        share = store.index(0)["tissue"].mean()
        assert share > 0.7 and store.spec["tissue_values"] == "0"
    del tiling["tissue_values"]
    with pytest.raises(UsageError, match="tissue_values: 0 in the store, None asked for"):
        histopipe.ingest(slides, tmp_path / "right.lmdb", **tiling)
    with pytest.raises(UsageError, match="--tissue-values: found --tissue none"):
        histopipe.ingest(slides, tmp_path / "x.lmdb", tissue_values="1", progress=SILENT)


# The frame of images with an EXIF orientation.


def turned_image(orientation: int, folder: Path, pixels: np.ndarray[Any, Any]) -> Path:
    """Save the pixels of a file with an orientation."""
    image, path = Image.fromarray(pixels), folder / "a.png"
    exif = image.getexif()
    exif[ExifTags.Base.Orientation] = orientation
    image.save(path, exif=exif, dpi=(25400 / 8, 25400 / 8))
    return path


@pytest.mark.parametrize("orientation", range(1, 9))
def test_places_are_turned_as_pillow_turns_images(tmp_path: Path, orientation: int) -> None:
    stored = np.arange(24, dtype=np.uint8).reshape(4, 6)
    with Image.open(turned_image(orientation, tmp_path, stored)) as image:
        turned = np.asarray(ImageOps.exif_transpose(image))
    turn = Turn(orientation, Size(turned.shape[1], turned.shape[0]))
    assert (turn.pixels(stored) == turned).all()
    y, x = (axis.ravel() for axis in np.mgrid[:4, :6])
    places = turn.turned(np.stack([x, y], axis=1), 1)
    assert (turned[places[:, 1], places[:, 0]] == stored.ravel()).all()
    assert (turn.stored(places, 1) == np.stack([x, y], axis=1)).all()


@pytest.fixture(scope="module")
def stored_scene() -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Mask]:
    """A picture in a file and its tissue, off its centre."""
    pixels, tissue = scene("h&e", 3)
    return pixels, tissue


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("frame", ["auto", "stored", "turned"])
@pytest.mark.parametrize("drawn_in", ["stored", "turned"])
def test_outlines_masks_and_coordinates_of_turned_images(
    tmp_path: Path, stored_scene: Any, orientation: int, frame: Any, drawn_in: str
) -> None:
    """Of a square in one frame: read in this frame, its patches are those of the square; else others, or none."""
    pixels, _ = stored_scene
    slides, notes = tmp_path / "slides", tmp_path / "annotations"
    slides.mkdir()
    notes.mkdir()
    turned_image(orientation, slides, pixels)
    height, width = pixels.shape[:2] if orientation < 5 else pixels.shape[1::-1]
    turn = Turn(orientation, Size(width, height))
    at_level0 = np.array([[64, 128]])
    corner = at_level0 if drawn_in == "turned" else turn.stored(at_level0, 128)
    x, y = corner[0].tolist()
    (notes / "a.geojson").write_text(json.dumps([feature([box(x, y, x + 128, y + 128)], "T")]))
    report = histopipe.ingest(
        slides,
        tmp_path / "s.lmdb",
        annotations=notes,
        frame=frame,
        patch_size=64,
        level=0,
        progress=SILENT,
    )
    assert report.exit_code == ExitCode.DONE
    is_right = drawn_in == ("turned" if frame == "turned" else "stored")
    expected = {(64, 128), (128, 128), (64, 192), (128, 192)}
    with Store(tmp_path / "s.lmdb") as store:
        index, record = store.index(0), store.records[0]
        labelled = index["label"] >= 0
        places = set(
            zip(index["x_l0"][labelled].tolist(), index["y_l0"][labelled].tolist(), strict=True)
        )
        assert (places == expected) == is_right
        assert (record.orientation, record.frame) == (orientation, frame)
    again = histopipe.annotate(tmp_path / "s.lmdb", notes, frame=frame, progress=SILENT)
    assert again.same == ["a"] if is_right else not again.done or places
    if frame == "turned":
        other = histopipe.annotate(tmp_path / "s.lmdb", notes, progress=SILENT)
        assert len(other.done) + len(other.unlabelled) == 1  # the frame is part of the rules


def test_records_without_orientation_mean_the_turned_frame(
    tmp_path: Path, stored_scene: Any
) -> None:
    """As earlier versions wrote them; another frame is refused, since the orientation is unknown."""
    slides, notes, path = tmp_path / "slides", tmp_path / "annotations", tmp_path / "s.lmdb"
    slides.mkdir()
    notes.mkdir()
    turned_image(6, slides, stored_scene[0])
    (notes / "a.geojson").write_text(json.dumps([feature([box(64, 128, 192, 256)], "T")]))
    histopipe.ingest(slides, path, patch_size=64, level=0, progress=SILENT)
    with StoreWriter(path) as writer:
        writer.change(0, orientation=None, frame=None)
    assert histopipe.annotate(path, notes, progress=SILENT).patches == {"T": 4}
    with Store(path) as store:
        index = store.index(0)
        labelled = index["label"] >= 0
        assert (index["x_l0"][labelled].min(), index["y_l0"][labelled].min()) == (64, 128)
    stored = histopipe.annotate(path, notes, frame="stored", progress=SILENT)
    assert "did not record its orientation" in stored.failed["a"]
    flip_bytes(path, [(0, 0)])  # repaired with outlines in the frame of before
    assert histopipe.repair(path, slides, annotations=notes, progress=SILENT).slides == ["a"]
    with Store(path) as store:
        assert (store.index(0)["label"] == index["label"]).all()
        assert (store.records[0].orientation, store.records[0].frame) == (6, "turned")


GRID = Grid(0, 0, 1.0, Size(720, 960), Size(720, 960))
WHOLE = RegionL0(PointL0(0, 0), GRID.slide)


def test_masks_are_written_in_the_stored_frame_and_read_again(
    tmp_path: Path, stored_scene: Any
) -> None:
    turn = Turn(6, GRID.slide)
    tissue = turn.pixels(stored_scene[1])
    write_mask(tmp_path, "a", TissueMask(tissue), GRID, WHOLE, orientation=6)
    outlines = json.loads((tmp_path / "a.geojson").read_text())
    plain = Grid(0, 0, 1.0, Size(960, 720), Size(960, 720))
    edited = tmp_path / "edited.geojson"  # as QuPath writes it
    edited.write_text(json.dumps(outlines["features"]))
    whole = RegionL0(PointL0(0, 0), plain.slide)
    assert (read_mask(edited, "a", plain, whole) == stored_scene[1]).all()
    for path in (tmp_path / "a.geojson", tmp_path / "a.png", edited):
        assert (read_mask(path, "a", GRID, WHOLE, orientation=6) == tissue).all()
    unchanged = read_mask_file(tmp_path / "a.geojson", "a", GRID, WHOLE, orientation=6)
    assert unchanged.is_ours
    outlines["features"] = outlines["features"][:1]
    (tmp_path / "a.geojson").write_text(json.dumps(outlines))
    edited_mask = read_mask_file(tmp_path / "a.geojson", "a", GRID, WHOLE, orientation=6)
    assert not edited_mask.is_ours  # so that it is compared
    del outlines["histopipe-frame"]  # as earlier versions wrote it, turned
    outlines["features"] = [feature([box(10, 10, 400, 300)], "Tissue")]
    (tmp_path / "a.geojson").write_text(json.dumps(outlines))
    earlier = read_mask(tmp_path / "a.geojson", "a", GRID, WHOLE, orientation=6)
    assert earlier[10:300, 10:400].all() and earlier.sum() == 290 * 390


@pytest.mark.parametrize("side", [720, 960])
@pytest.mark.parametrize("frame", ["stored", "turned"])
def test_frame_of_a_picture_follows_from_its_shape_or_from_the_tissue(
    tmp_path: Path, stored_scene: Any, side: int, frame: str
) -> None:
    pixels, tissue = (part[:, :side] for part in stored_scene)
    turn = Turn(6, Size(720, side))
    grid = Grid(0, 0, 1.0, turn.size, turn.size)
    whole = RegionL0(PointL0(0, 0), turn.size)
    Image.fromarray(tissue if frame == "stored" else turn.pixels(tissue)).save(tmp_path / "a.png")
    content = read_mask_file(tmp_path / "a.png", "a", grid, whole, orientation=6)
    assert set(content.by_frame) == ({frame} if side == 960 else {"stored", "turned"})
    thumbnail = thumbnail_of(np.ascontiguousarray(turn.pixels(pixels)))
    mask = checked_mask(content, thumbnail, "off", "the mask")
    assert (mask.pixels == turn.pixels(tissue)).all()
    assert mask.notes == (f"its mask is in the {frame} frame",) * (side == 720)
    if side == 720:
        even = thumbnail_of(np.full((720, 720, 3), 180, np.uint8))
        with pytest.raises(MaskUnfit, match="name its frame: --frame stored or --frame turned"):
            checked_mask(content, even, "off", "the mask")
        named: Any = {"orientation": 6, "frame": frame}
        assert [*read_mask_file(tmp_path / "a.png", "a", grid, whole, **named).by_frame] == [frame]


@pytest.mark.parametrize("frame", ["auto", "turned"])
def test_imported_coordinates_of_turned_images(
    tmp_path: Path, stored_scene: Any, frame: Any
) -> None:
    """Their patches have the pixels that the other tool has seen: those at the coordinates of the stored image."""
    pixels, _ = stored_scene
    (tmp_path / "slides").mkdir()
    turned_image(6, tmp_path / "slides", pixels)
    corners = [(100, 40), (400, 300)]
    write_coords(tmp_path / "coords" / "a.h5", corners, patch_size=64, patch_level=0)
    histopipe.import_coords(
        tmp_path / "coords",
        tmp_path / "slides",
        tmp_path / "s.lmdb",
        frame=frame,
        codec="png",
        progress=SILENT,
    )
    turned = Turn(6, Size(720, 960)).pixels(pixels)
    with Store(tmp_path / "s.lmdb") as store:
        for row, (x, y) in enumerate(corners):
            seen = pixels[y : y + 64, x : x + 64]
            expected = np.rot90(seen, -1) if frame == "auto" else turned[y : y + 64, x : x + 64]
            assert (store.read("a", row) == expected).all()


def test_heatmaps_for_qupath_are_in_the_stored_frame(tmp_path: Path) -> None:
    size: dict[str, Any] = {"width": 720, "height": 960, "bounds": [0, 0, 720, 960]}
    scale: dict[str, Any] = {"mpp": 8.0, "mpp_source": None, "size_l0": 64.0, "stride_l0": 64.0}
    slide = PredictedSlide(
        slide="a", patient="a", label=None, **size, **scale, source="", orientation=6
    )
    at_level0 = np.array([[64, 128], [320, 640]])
    x, y = at_level0.T
    heat = NamedPatchValues(slide, "p", x, y, np.array([0.2, 0.9], np.float32))
    write_heatmap_geojson(heat, tmp_path / "a.geojson", objects="cells")
    cells = [outline["geometry"] for outline in json.loads(text_of(tmp_path / "a.geojson"))]
    corners = Turn(6, Size(720, 960)).stored(at_level0, 64)
    assert [cell["coordinates"][0][0] for cell in cells] == corners.tolist()
    write_heatmap_tiff(heat, tmp_path / "a.tiff")
    with Image.open(tmp_path / "a.tiff") as image:
        assert image.width / image.height == pytest.approx(960 / 720, rel=0.01)
        scaled = np.asarray(image)
    step = 960 / scaled.shape[1]
    for left, top in corners.tolist():
        assert (scaled[int((top + 32) / step), int((left + 32) / step)] != 255).any()
    assert slide.geometry["orientation"] == 6


def text_of(path: Path) -> str:
    """Return the features of a collection as JSON."""
    return json.dumps(json.loads(path.read_text())["features"])
