"""Compare the pixels of every accepted file of a matrix with those that it was made from, and with another decoder.

    python tools/check_pixels.py

The matrix has photometric interpretations, bits, planes, compressions, chroma samplings, tiles and strips, containers
and readers. A file must be refused, or have the right pixels through its reader and in the patches of every route, or,
if its header contradicts its tiles, have a note about its colours. Prints the files that have none of these.
"""

from __future__ import annotations

import io
import itertools
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import imagecodecs
import numpy as np
import pydicom
import tifffile
from numpy.typing import NDArray
from PIL import Image
from pydicom import uid
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate

from histopipe.errors import SlideUnreadable
from histopipe.geometry import PointL0
from histopipe.ingestion.options import AskedRoute, IngestOptions
from histopipe.ingestion.patch_source import PatchSource
from histopipe.ingestion.planning import plan_slide
from histopipe.ingestion.slide_job import SlideJob, SlidePlan
from histopipe.slides.slide_files import SlideFile, open_slide
from histopipe.tiling.spec import TilingSpec

Pixels = NDArray[np.uint8]
Outcome = str
"""`equal`, `refused`, `noted`, or a text about wrong pixels."""

READERS = ("auto", "openslide", "tifffile")
"""fastslide is left out: tiles that it cannot decode are white, with a message of the library on stderr only."""
SIZE = (150, 200)
TILE = 64
_SVS = "Aperio Image Library v11.2.1 \r\n200x150 (64x64)|AppMag = 20|MPP = 0.5"
COMPRESSIONS = (
    "none",
    "lzw",
    "deflate",
    "packbits",
    "zstd",
    "jpeg",
    "webp",
    "jpeg2000",
    "aperio_jp2000_rgb",
    "aperio_jp2000_ycbc",
    "lzma",
    "png",
    "jpegxl",
)
_PREDICTED = ("lzw", "deflate", "zstd")
SAMPLINGS = ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1))


@dataclass(frozen=True)
class Case:
    """A file of the matrix: its name, the pixels that it shows, and how to write it.

    `truth` is (H, W, 3) uint8; None if no file of this kind can be accepted. `tolerance` is the largest mean absolute
    difference from it. A file whose header is `contradictory` may have other pixels, but only with a note.
    """

    name: str
    truth: Pixels | None
    data: Any
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    contradictory: bool = False

    def write(self, folder: Path) -> Path | None:
        """Write the file; None if the libraries cannot write this combination."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.suffix == ".dcm":
                write_dicom(path, self.data, **self.options)
            else:
                tifffile.imwrite(path, self.data, **self.options)
        except Exception:  # noqa: BLE001 - the writers raise many types
            return None
        return path


def picture() -> Pixels:
    """Return coloured waves on glass, (H, W, 3) uint8."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]].astype(np.float64)
    waves = [150 + 60 * np.sin(x / 17), 90 + 50 * np.cos(y / 13), 180 + 40 * np.sin((x + y) / 23)]
    pixels = np.stack(waves, axis=2).round().astype(np.uint8)
    pixels[np.hypot(x - 100, y - 75) > 70] = 242
    return pixels


def ycbcr(pixels: Pixels) -> Pixels:
    """Return RGB pixels as YCbCr."""
    return np.asarray(Image.fromarray(pixels).convert("YCbCr"))


def kinds(rgb: Pixels) -> Iterator[tuple[str, Pixels | None, Any, dict[str, Any]]]:
    """Yield the name, the truth, the array and the options of each kind of pixels of TIFF files."""
    grey = rgb[..., 1]
    grey3 = np.repeat(grey[..., None], 3, axis=2)
    alpha = np.linspace(0, 255, SIZE[1]).astype(np.uint8)[None, :, None].repeat(SIZE[0], 0)
    share = alpha / 255
    blended = (rgb * share + 255 * (1 - share)).round().astype(np.uint8)
    colours = np.random.default_rng(0).integers(0, 1 << 16, (3, 256)).astype(np.uint16)
    colour = {"photometric": "rgb"}
    black = {"photometric": "minisblack"}
    yield "rgb", rgb, rgb, colour
    yield "planes", rgb, rgb.transpose(2, 0, 1), {**colour, "planarconfig": "separate"}
    yield "predictor", rgb, rgb, {**colour, "predictor": True}
    yield "grey", grey3, grey, black
    yield "white", grey3, 255 - grey, {"photometric": "miniswhite"}
    yield (
        "palette",
        (colours[:, grey] >> 8).transpose(1, 2, 0).astype(np.uint8),
        grey,
        {
            "photometric": "palette",
            "colormap": colours,
        },
    )
    yield (
        "alpha",
        blended,
        np.concatenate([rgb, alpha], 2),
        {**colour, "extrasamples": ["unassalpha"]},
    )
    yield (
        "associated alpha",
        blended,
        np.concatenate([(rgb * share).round().astype(np.uint8), alpha], 2),
        {
            **colour,
            "extrasamples": ["assocalpha"],
        },
    )
    yield (
        "fourth channel",
        rgb,
        np.concatenate([rgb, alpha], 2),
        {
            **colour,
            "extrasamples": ["unspecified"],
        },
    )
    yield (
        "grey alpha",
        None,
        np.concatenate([grey[..., None], alpha], 2),
        {
            **black,
            "extrasamples": ["unassalpha"],
        },
    )
    yield (
        "three greys",
        None,
        rgb,
        {
            **black,
            "planarconfig": "contig",
            "extrasamples": ["unspecified"] * 2,
        },
    )
    for sampling in SAMPLINGS:
        yield (
            f"ycbcr {sampling[0]}{sampling[1]}",
            rgb,
            ycbcr(rgb),
            {
                "photometric": "ycbcr",
                "subsampling": sampling,
            },
        )
    yield "cmyk", None, np.concatenate([255 - rgb, 0 * alpha], 2), {"photometric": "separated"}
    yield "cielab", None, rgb, {"photometric": "cielab"}
    yield "icclab", None, rgb, {"photometric": "icclab"}
    for name, array in (
        ("16 bits", rgb.astype(np.uint16) * 16),
        ("32 bits", rgb.astype(np.uint32)),
        ("float", (rgb / 255).astype(np.float32)),
        ("signed", (rgb // 2).astype(np.int8)),
    ):
        yield f"rgb {name}", None, array, colour
        yield f"grey {name}", None, array[..., 1], black
        yield (
            f"planes {name}",
            None,
            array.transpose(2, 0, 1),
            {**colour, "planarconfig": "separate"},
        )
    yield "bilevel", None, grey > 100, black


def tiff_cases() -> Iterator[Case]:
    """Yield the TIFF files of the matrix."""
    for kind, compression, suffix, tiled in itertools.product(
        kinds(picture()), COMPRESSIONS, (".tif", ".svs", ".ome.tif"), (True, False)
    ):
        name, truth, array, options = kind
        if (name == "predictor" and compression not in _PREDICTED) or (name, compression) == (
            "palette",
            "jpeg",
        ):
            continue  # combinations without a meaning, which writers allow
        layout = {"tile": (TILE, TILE)} if tiled else {"rowsperstrip": 16}
        chosen = {**options, **layout, "resolution": (2e4, 2e4), "resolutionunit": 3}
        if suffix != ".ome.tif":
            chosen |= {"metadata": None, "description": _SVS if suffix == ".svs" else None}
        if compression != "none":
            chosen["compression"] = compression
        if compression == "jpeg":
            chosen["compressionargs"] = {"level": 95}
        lossy = 2.5 if compression == "jpeg" else 1.0 if "ycbcr" in name or "alpha" in name else 0.0
        # These compressions are RGB, and YCbCr without a component transform, which tifffile always writes.
        wrong = compression == "aperio_jp2000_ycbc" or (
            compression == "aperio_jp2000_rgb" and "ycbcr" in name
        )
        yield Case(
            f"{name}-{compression}-{'tiles' if tiled else 'strips'}{suffix}",
            truth,
            array,
            chosen,
            lossy,
            wrong,
        )


def tiles_of(pixels: Any) -> list[Any]:
    """Return the tiles of an image, with its edge repeated."""
    height, width = pixels.shape[:2]
    padding = ((0, -height % TILE), (0, -width % TILE), *((0, 0),) * (pixels.ndim - 2))
    padded = np.pad(pixels, padding, "edge")
    return [
        np.ascontiguousarray(padded[y : y + TILE, x : x + TILE])
        for y in range(0, height, TILE)
        for x in range(0, width, TILE)
    ]


def jpeg(pixels: Pixels, **save: Any) -> bytes:
    """Return a tile as a JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **{"quality": 95, "subsampling": 0, **save})
    return buffer.getvalue()


def jpeg_2000(pixels: Pixels, *, transform: bool) -> bytes:
    """Return a tile as a lossless JPEG 2000 code stream."""
    return bytes(
        imagecodecs.jpeg2k_encode(
            pixels, level=0, codecformat="j2k", mct=transform, reversible=True
        )
    )


def write_dicom(
    path: Path,
    frames: list[bytes],
    *,
    syntax: str,
    photometric: str,
    samples: int = 3,
    bits: int = 8,
    planar: int = 0,
    signed: int = 0,
) -> None:
    """Write a whole-slide image of one level."""
    image = Dataset()
    image.file_meta = FileMetaDataset()
    image.file_meta.TransferSyntaxUID = uid.UID(syntax)
    image.SOPClassUID = uid.VLWholeSlideMicroscopyImageStorage
    image.file_meta.MediaStorageSOPClassUID = image.SOPClassUID
    for name in ("SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID"):
        setattr(image, name, uid.generate_uid())
    image.file_meta.MediaStorageSOPInstanceUID = image.SOPInstanceUID
    image.ImageType, image.Modality = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"], "SM"
    image.TotalPixelMatrixRows, image.TotalPixelMatrixColumns = SIZE
    image.Columns = image.Rows = TILE
    image.NumberOfFrames, image.DimensionOrganizationType = len(frames), "TILED_FULL"
    image.SamplesPerPixel, image.PhotometricInterpretation = samples, photometric
    image.PlanarConfiguration = planar
    image.BitsAllocated = image.BitsStored = bits
    image.HighBit, image.PixelRepresentation = bits - 1, signed
    measures, group, optical = Dataset(), Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = [0.0005, 0.0005], 0.001
    group.PixelMeasuresSequence = [measures]
    image.SharedFunctionalGroupsSequence = [group]
    image.TotalPixelMatrixFocalPlanes = image.NumberOfOpticalPaths = 1
    optical.OpticalPathIdentifier = "1"
    image.OpticalPathSequence = [optical]
    if syntax == uid.ExplicitVRLittleEndian:
        image.PixelData = b"".join(frames)
    else:
        image.PixelData = encapsulate(frames)
    image["PixelData"].VR = "OB" if bits == 8 else "OW"
    pydicom.dcmwrite(path, image, enforce_file_format=True)


def dicom_cases() -> Iterator[Case]:
    """Yield the DICOM files of the matrix: each kind of frames under each declared interpretation."""
    rgb = picture()
    grey = rgb[..., 1]
    grey3 = np.repeat(grey[..., None], 3, axis=2)
    baseline, lossless, lossy = uid.JPEGBaseline8Bit, uid.JPEG2000Lossless, uid.JPEG2000
    raw = uid.ExplicitVRLittleEndian
    transformed = ("YBR_ICT", "YBR_RCT")
    frames: list[tuple[str, str, list[bytes], tuple[str, ...], float]] = [
        (
            "jpeg-ycbcr",
            baseline,
            [jpeg(t) for t in tiles_of(rgb)],
            ("YBR_FULL_422", "YBR_FULL"),
            2.0,
        ),
        (
            "jpeg-ycbcr-420",
            baseline,
            [jpeg(t, subsampling=2) for t in tiles_of(rgb)],
            ("YBR_FULL_422",),
            3.0,
        ),
        ("jpeg-rgb", baseline, [jpeg(t, keep_rgb=True) for t in tiles_of(rgb)], ("RGB",), 1.0),
        ("raw", raw, [t.tobytes() for t in tiles_of(rgb)], ("RGB",), 0.0),
    ]
    syntax: str
    for syntax, name in ((lossless, "lossless"), (lossy, "lossy")):
        frames += [
            (
                f"j2k-{name}",
                syntax,
                [jpeg_2000(t, transform=True) for t in tiles_of(rgb)],
                ("RGB", *transformed),
                0.0,
            ),
            (
                f"j2k-{name}-rgb",
                syntax,
                [jpeg_2000(t, transform=False) for t in tiles_of(rgb)],
                ("RGB",),
                0.0,
            ),
            (
                f"j2k-{name}-ycbcr",
                syntax,
                [jpeg_2000(t, transform=False) for t in tiles_of(ycbcr(rgb))],
                (),
                1.0,
            ),
        ]
    for (name, syntax, tiles, right, tolerance), photometric in itertools.product(
        frames, ("RGB", "YBR_FULL", "YBR_FULL_422", *transformed, "MONOCHROME2")
    ):
        yield Case(
            f"{name}-{photometric}/a.dcm",
            rgb,
            tiles,
            {"syntax": syntax, "photometric": photometric},
            tolerance,
            photometric not in right,
        )
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("16 bits", rgb.astype(np.uint16) * 16, {"photometric": "RGB", "bits": 16}),
        ("signed", rgb, {"photometric": "RGB", "signed": 1}),
        ("planes", rgb, {"photometric": "RGB", "planar": 1}),
        ("white", 255 - grey, {"photometric": "MONOCHROME1", "samples": 1}),
        ("grey", grey, {"photometric": "MONOCHROME2", "samples": 1}),
    ]
    for name, array, options in refused:
        planes = [t.transpose(2, 0, 1) if name == "planes" else t for t in tiles_of(array)]
        truth = grey3 if array.ndim == 2 else rgb if name == "planes" else None
        data = [t.tobytes() for t in planes]
        yield Case(f"raw-{name}/a.dcm", truth, data, {"syntax": raw, **options})


def check(case: Case, path: Path, reader: str) -> Outcome:
    """Return the outcome of a file through a reader: of all of its pixels, and of its patches by every route."""
    try:
        with open_slide(path, reader) as slide:
            pixels = slide.read_region(PointL0(0, 0), 0, slide.info.size)
    except SlideUnreadable:
        return "refused"
    if case.truth is None or pixels.shape != case.truth.shape:
        return f"accepted, with a mean of {pixels.mean():.0f} and the shape {pixels.shape}"
    difference = np.abs(pixels.astype(int) - case.truth).mean()
    wrong = difference > case.tolerance or (case.tolerance and other_decoder(path, pixels))
    notes = route_notes(path, reader, pixels)
    if isinstance(notes, str):
        return notes
    if case.contradictory and any("colours" in note for note in notes):
        return "noted" if wrong else "equal"
    return f"mean difference of {difference:.2f}" if wrong else "equal"


def route_notes(path: Path, reader: str, pixels: Pixels) -> list[str] | str:
    """Return the notes of all routes; a text if a patch differs from the pixels of the slide."""
    notes: list[str] = []
    for route in get_args(AskedRoute):
        planned, values = patches(path, reader, route)
        if planned is None:
            continue
        notes += planned.record.notes
        for n, value in enumerate(values):
            y, x = int(planned.plan.y_level[n]), int(planned.plan.x_level[n])
            if not np.array_equal(value, pixels[y : y + TILE, x : x + TILE]):
                return f"patch {n} of route {route} differs from the slide"
    return notes


def other_decoder(path: Path, pixels: Pixels) -> bool:
    """Return whether a lossy TIFF file is decoded differently by libtiff: by up to 8 for rounding, in few pixels."""
    try:
        with Image.open(path) as image:
            if image.mode not in ("RGB", "L"):
                return False
            expected = np.asarray(image.convert("RGB"))
    except (OSError, ValueError):
        return False
    return bool(np.abs(pixels.astype(int) - expected).mean() > 0.5)


def patches(path: Path, reader: str, route: AskedRoute) -> tuple[SlidePlan | None, list[Pixels]]:
    """Return the plan and the patches of a slide as pixels; none if the route is impossible."""
    job = SlideJob(SlideFile("a", path, (path,)))
    spec = TilingSpec(patch_size=TILE, level=0, tissue="none", codec="png")
    options = IngestOptions(route=route, reader=reader)  # type: ignore[arg-type]
    planned = plan_slide(job, spec, options)
    if not isinstance(planned, SlidePlan):
        return None, []
    with PatchSource(planned.recipe) as source:
        values = source.values(planned.plan)
    decoded = []
    for value in values:
        if not isinstance(value, bytes):
            raise value
        decoded.append(np.asarray(Image.open(io.BytesIO(value)).convert("RGB")))
    return planned, decoded


def main() -> int:
    """Check the matrix, and print the wrong files and the number of files by outcome."""
    logging.disable(logging.CRITICAL)
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for case in itertools.chain(tiff_cases(), dicom_cases()):
            path = case.write(Path(folder))
            if path is None:
                continue
            for reader in READERS:
                outcome = check(case, path, reader)
                accepted = outcome in ("equal", "refused", "noted")
                counts[outcome if accepted else "wrong"] += 1
                if not accepted:
                    print(f"{case.name} by {reader}: {outcome}", flush=True)
            path.unlink()
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
