"""Change bytes of files that may be untrusted. Each must be read, or refused with an error of histopipe.

python -P tests/programs/fuzz.py RUN STORE FOLDER --rounds 200 --seed 1

RUN is the folder of a finished run, STORE its store, and FOLDER a new folder for the changed files. The program limits
its memory, prints the number of refused files per parser, and returns 1 if there is any other error.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pydicom
import simplejpeg
import tifffile
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import UID, JPEGBaseline8Bit, VLWholeSlideMicroscopyImageStorage

from histopipe.annotations.annotation_files import read_annotations
from histopipe.demo.synthetic_slides import write_tiff_page
from histopipe.errors import HistopipeError
from histopipe.features.feature_file import writing
from histopipe.features.feature_sets import check_features
from histopipe.geometry import Level, PointL0, RegionL0, RegionLevel, Size
from histopipe.ingestion.coords import check_coords
from histopipe.predictions.prediction_tables import read_predictions
from histopipe.predictions.sources import PredictedSlide
from histopipe.runs.run import Run
from histopipe.runs.task_config import read_config
from histopipe.search.search_settings import read_space
from histopipe.slides import dicom_tiles, tiff_tiles
from histopipe.slides.discovery import discover
from histopipe.slides.native_tiles import NativeLevel, NativeTiles, NotNative
from histopipe.slides.slide import SlideInfo
from histopipe.slides.slide_files import SlideFile, SlideNames
from histopipe.slides.tables import read_labels, read_mpps, select_listed
from histopipe.slides.tiff_reader import TiffReader
from histopipe.splits.splits import read_splits, recorded_numbers, trained_on
from histopipe.store.reading import decode, decode_picture
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store

SPARE_BYTES = 1 << 30
HDF5_SECONDS = 5.0
HDF5_ROUNDS = 15
"""Each round starts a process, since HDF5 may hang or crash."""

TILE = 64
LEVEL = Level(0, Size(100, 100), 1.0)
INFO = SlideInfo(
    vendor="generic-tiff",
    levels=(LEVEL,),
    bounds=RegionL0(PointL0(0, 0), LEVEL.size),
    mpp_x=None,
    mpp_y=None,
    objective_power=None,
    quickhash=None,
    has_icc_profile=False,
)
SLOWEST = 20.0
TOKENS = (
    b"-1",
    b"0",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b"9" * 30,
    b"9" * 5000,
    b"[" * 50_000,
    b"\x00",
    b"\xff\xfe",
    b",,,,",
    b"\n\n",
    b'"',
    b"4294967296",
    b"99999999999",
    b"../../x",
    b"\xf0\x9f\x92\xa5",
)

Parser = Callable[[Path], object]


def parsers(run: Path, store: Store) -> dict[str, tuple[bytes, Parser]]:
    """Return the content of a valid file and its parser, by file name."""
    names = SlideNames([record.id for record in store.slides])
    first = store.slides[0]
    listed = [SlideFile(first.id, Path("x.svs"), ())]
    table = "".join(f"{record.id},{'ab'[n % 2]},p{n}\n" for n, record in enumerate(store.slides))
    predicted = PredictedSlide.of(first, source="x.svs")
    geojson = b'{"type":"FeatureCollection","features":[{"type":"Feature","geometry":{"type":"Polygon","coordinates":[[[0,0],[9,0],[9,9],[0,0]]]},"properties":{"classification":{"name":"a"}}}]}'
    asap = b'<?xml version="1.0"?><ASAP_Annotations><Annotations><Annotation Name="x" Type="Polygon" PartOfGroup="a"><Coordinates><Coordinate Order="0" X="0" Y="0"/><Coordinate Order="1" X="9" Y="0"/><Coordinate Order="2" X="9" Y="9"/></Coordinates></Annotation></Annotations></ASAP_Annotations>'
    scratch = run / "fuzz-scratch"
    scratch.mkdir(exist_ok=True)
    predicted.write(scratch / "facts.json")
    write_slides(scratch)
    write_hdf5(scratch)
    inputs: dict[str, tuple[bytes, Parser]] = {
        "splits.json": (
            (run / "splits.json").read_bytes(),
            lambda p: (read_splits(p, [store]), trained_on(p), recorded_numbers(p)),
        ),
        "config.toml": ((run / "config.toml").read_bytes(), read_config),
        "metrics.json": ((run / "metrics.json").read_bytes(), lambda p: Run(p.parent).result),
        "predictions.csv": ((run / "predictions.csv").read_bytes(), read_predictions),
        "labels.csv": (b"slide,label,patient\n" + table.encode(), lambda p: read_labels(p, names)),
        "list.csv": (b"slide\n" + first.id.encode(), lambda p: select_listed(listed, p, names)),
        "mpp.csv": (f"slide,mpp\n{first.id},0.5\n".encode(), lambda p: read_mpps(p, names)),
        "space.toml": (
            b"epochs = [1, 2]\nlearning_rate = {low = 1e-4, high = 1e-2, log = true}\n",
            read_space,
        ),
        "facts.json": ((scratch / "facts.json").read_bytes(), PredictedSlide.read),
        "x.geojson": (geojson, read_annotations),
        "x.xml": (asap, read_annotations),
        "record": (
            first.to_bytes(0),
            lambda p: SlideRecord.from_bytes(0, p.read_bytes(), where="record"),
        ),
        "patch": (
            store.value(0, 0),
            lambda p: decode(
                memoryview(p.read_bytes()), np.empty((store.patch_size,) * 2 + (3,), np.uint8)
            ),
        ),
        "thumbnail": (
            store.thumbnail(0) or b"",
            lambda p: decode_picture(p.read_bytes(), "thumbnail"),
        ),
        "mask": (
            store.thumbnail(0, "mask") or b"",
            lambda p: decode_picture(p.read_bytes(), "mask", mode="L"),
        ),
        "x.tiff": (
            (scratch / "x.tiff").read_bytes(),
            lambda p: tiles_of(tiff_tiles.find_tiles((p,), INFO, LEVEL)),
        ),
        "x.ome.tiff": ((scratch / "x.ome.tiff").read_bytes(), read_tiff),
        "dicom/x.dcm": ((scratch / "x.dcm").read_bytes(), read_dicom),
        "features/x.h5": (
            (scratch / "features.h5").read_bytes(),
            lambda p: check_features(p.parent, seconds=HDF5_SECONDS),
        ),
        "coords/x.h5": (
            (scratch / "coords.h5").read_bytes(),
            lambda p: check_coords(p.parent, seconds=HDF5_SECONDS),
        ),
    }
    shutil.rmtree(scratch)
    return inputs


def write_slides(folder: Path) -> None:
    """Write a slide of four tiles as TIFF, as OME-TIFF with two levels and as DICOM."""
    noise = np.random.default_rng(0).integers(0, 255, (4, TILE, TILE, 3), np.uint8)
    tiles = [simplejpeg.encode_jpeg(tile, 80, colorsubsampling="444") for tile in noise]
    with tifffile.TiffWriter(folder / "x.tiff", bigtiff=True) as file:
        write_tiff_page(file, LEVEL.size, Size(TILE, TILE), tiles, mpp=0.5, subsampling="444")
    with tifffile.TiffWriter(folder / "x.ome.tiff", ome=True) as tiff:
        options: dict[str, Any] = {"tile": (TILE, TILE), "photometric": "rgb", "compression": "lzw"}
        tiff.write(
            noise.reshape(2 * TILE, 2 * TILE, 3), subifds=1, metadata={"axes": "YXS"}, **options
        )
        tiff.write(noise[0], subfiletype=1, **options)
    header = pydicom.Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = JPEGBaseline8Bit
    header.ImageType = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    header.TotalPixelMatrixColumns = LEVEL.size.width
    header.TotalPixelMatrixRows = LEVEL.size.height
    header.Rows = header.Columns = TILE
    header.PhotometricInterpretation = "YBR_FULL"
    header.DimensionOrganizationType = "TILED_FULL"
    header.SOPClassUID = VLWholeSlideMicroscopyImageStorage
    header.file_meta.MediaStorageSOPClassUID = header.SOPClassUID
    header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = UID("1.2")
    header.PixelData = encapsulate(tiles)
    header["PixelData"].is_undefined_length = True
    header.save_as(folder / "x.dcm", enforce_file_format=True)


def write_hdf5(folder: Path) -> None:
    """Write features, and coordinates in the format of CLAM."""
    corners = np.arange(40).reshape(20, 2)
    with writing(folder / "features.h5", 20, 8, "float32") as features:
        features.append(np.ones((20, 8), np.float32), corners)
        features.finish({}, {})
    with h5py.File(folder / "coords.h5", "w") as file:
        file["coords"] = corners
        file["coords"].attrs.update({"patch_size": 256, "patch_level": 0})


def read_tiff(path: Path) -> None:
    """Open an OME-TIFF file, and read a part of each level."""
    with TiffReader(path) as slide:
        for level in slide.info.levels:
            slide.read_region(PointL0(0, 0), level.number, Size(150, 150))


def read_dicom(path: Path) -> None:
    """Find a DICOM series, and decode its tiles."""
    discover([path.parent])
    tiles_of(dicom_tiles.find_tiles((path,), LEVEL))


def tiles_of(native: NativeLevel) -> None:
    """Decode all tiles of a level."""
    with NativeTiles(native) as tiles:
        tiles.pixels(RegionLevel(0, 0, native.size))


def changed(rng: random.Random, content: bytes) -> bytes:
    """Return the content with some bytes changed."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        i = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[i : i + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[i : i + rng.choice([1, 10, len(data)])]
            case 2:
                data[i:i] = rng.choice(TOKENS)
            case 3:
                data[i : i + rng.choice([1, 4, 8])] = rng.choice(TOKENS)[:64]
            case _:
                data[i:i] = data[i : i + rng.choice([3, 40])]
    return bytes(data)


def main() -> None:
    """Change files, parse them, and count refusals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    shutil.copytree(arguments.run, arguments.folder)
    failures = 0
    with Store(arguments.store) as store:
        inputs = parsers(arguments.folder, store)
        for name, (content, parse) in inputs.items():
            path = arguments.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            parse(path)
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + SPARE_BYTES, used + SPARE_BYTES))
        for name, (content, parse) in inputs.items():
            refused, path = 0, arguments.folder / name
            rounds = HDF5_ROUNDS if name.endswith(".h5") else arguments.rounds
            for _ in range(rounds):
                data = changed(rng, content)
                path.write_bytes(data)
                started = time.monotonic()
                try:
                    parse(path)
                except (HistopipeError, NotNative):
                    refused += 1
                except BaseException:  # noqa: BLE001 - all other errors are bugs
                    failures += 1
                    print(
                        f"{name}, seed {arguments.seed}: {data[:200]!r}\n{traceback.format_exc()}"
                    )
                    break
                if time.monotonic() - started > SLOWEST:
                    failures += 1
                    print(f"{name} took {time.monotonic() - started:.0f} s: {data[:200]!r}")
            path.write_bytes(content)
            print(f"{name}: {refused} of {rounds} refused", flush=True)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
