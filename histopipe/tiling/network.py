"""Segmentation networks of users that find tissue: an ONNX or Keras file, and a JSON file that describes its input and output.

A network sees overlapping tiles of the slide, and the middle of each result is kept.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import cv2
import numpy as np
from numpy.typing import NDArray

from histopipe.annotations.rules import BACKGROUND
from histopipe.errors import (
    MaskUnfit,
    ScaleError,
    SlideUnreadable,
    UsageError,
    first_line,
    needs_extra,
    reported_as,
)
from histopipe.geometry import SCALE_TOLERANCE, Mpp, PointL0, Size
from histopipe.slides.scale import PLAUSIBLE_MPP
from histopipe.slides.slide import Slide
from histopipe.slides.thumbnail import Thumbnail, thumbnail_level
from histopipe.system.files import read_json
from histopipe.system.folders import FolderKind, folder_kind
from histopipe.system.settings import read_toml
from histopipe.tiling.mask import Grid, TissueMask, with_lost_areas

SUFFIXES = (".onnx", ".keras")
Layout = Literal["NCHW", "NHWC"]
Output = Literal["logits", "probabilities"]
_EXAMPLE = (
    '{"mpp": 10, "size": 512, "layout": "NCHW", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], '
    '"class": 1, "output": "logits", "threshold": 0.5}'
)
_OVERLAP = 4
"""A quarter of a tile overlaps with the next: its border has less context."""
_BATCH = 4
"""Tiles that are computed at once. Few, since each worker process needs the memory of a batch."""
_LARGEST_MAP = 1_000_000_000
"""Most pixels of a slide at the scale of a network: a byte each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmenter:
    """Description of a segmentation network; the fields of its JSON file.

    Tiles are squares of `size` pixels at `mpp` µm per pixel, divided by 255, minus `mean`, divided by `std`; uint8 pixels
    of a run (`of_run`). The output has one map, or one per class; `class_index` is the tissue. `output` "logits" are
    converted to probabilities.
    """

    mpp: Mpp
    size: int
    layout: Layout
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    class_index: int = 1
    output: Output = "logits"
    threshold: float = 0.5
    of_run: bool = False


def description_of(path: Path) -> Path:
    """Return the file that describes a network: `metrics.json` of a run, else `NAME.json` next to `NAME.onnx`."""
    is_run = folder_kind(path.parent) is FolderKind.RUN
    return path.with_name("metrics.json") if is_run else path.with_suffix(".json")


def _segmenter_of_run(path: Path, described: Path) -> Segmenter:
    """Return the description of the model of a run that segments tissue from background."""
    fields = read_description(described, "the run has not finished", "a finished run")
    classes, mpp = fields.get("classes") or [], fields.get("patch_mpp")
    if fields.get("task") != "segmentation" or len(classes) != 2 or not mpp:
        raise UsageError(
            f"--tissue {path.parent}",
            found=f"a run of {fields.get('task', 'classification')}, classes {', '.join(classes)}",
            expected="a segmentation with two classes, such as background and tissue, of patches with a scale",
        )
    if (stain := read_toml(path.with_name("config.toml")).get("stain_norm", "none")) != "none":
        raise UsageError(
            f"--tissue {path.parent}",
            found=f"a run with --stain-norm {stain}",
            expected="a run without: the stain of a slide is measured in its tissue",
        )
    index = 1 - classes.index(BACKGROUND) if BACKGROUND in classes else 1
    return Segmenter(
        mpp=Mpp(mpp), size=int(fields["spec"]["patch_size"]), layout="NHWC", class_index=index,
        output="probabilities", of_run=True,
    )  # fmt: skip


def read_segmenter(path: Path) -> Segmenter:
    """Read the description of a network; see `description_of`.

    Raises:
        UsageError: a file is missing, or a value is wrong.
    """
    described = description_of(path)
    if described.stem != path.stem:
        return _segmenter_of_run(path, described)
    fields = read_description(described, f"it describes the input of {path.name}", _EXAMPLE)
    checks: dict[str, Callable[[Any], bool]] = {
        "mpp": lambda mpp: isinstance(mpp, int | float) and mpp > 0,
        "size": lambda size: type(size) is int and 16 <= size <= 4096,
        "layout": lambda layout: layout in get_args(Layout),
        "mean": is_colour,
        "std": lambda colour: is_colour(colour) and min(colour) > 0,
        "class": lambda index: type(index) is int and index >= 0,
        "output": lambda output: output in get_args(Output),
        "threshold": lambda threshold: isinstance(threshold, int | float) and 0 < threshold < 1,
    }
    wrong = [
        *(name for name in fields if name not in checks or not checks[name](fields[name])),
        *(name for name in ("mpp", "size", "layout") if name not in fields),
    ]
    if wrong:
        raise UsageError(
            f"{described}: {wrong[0]}",
            found=repr(fields.get(wrong[0], "nothing")),
            expected=_EXAMPLE,
        )
    settings: dict[str, Any] = {
        "class_index" if name == "class" else name: tuple(v) if isinstance(v, list) else v
        for name, v in fields.items()
    }
    low, high = PLAUSIBLE_MPP
    if not low <= fields["mpp"] <= high:
        raise UsageError(
            f"{described}: mpp", found=fields["mpp"], expected=f"from {low:g} to {high:g}"
        )
    return Segmenter(**{**settings, "mpp": Mpp(float(fields["mpp"]))})


def read_description(
    path: Path, purpose: str, example: str, todo: str | None = None
) -> dict[str, Any]:
    """Read the JSON file that describes a network; empty if it is no object.

    Raises:
        UsageError: the file is missing, with its `purpose`, an `example` and what to do; or it cannot be read.
    """
    try:
        value = read_json(path)
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} is missing: {purpose}", expected=f"such as {example}", todo=todo
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error), expected=example) from error
    return value if isinstance(value, dict) else {}


def is_colour(value: Any) -> bool:
    """Return whether a value of JSON is a list of three numbers."""
    return (
        isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) for v in value)
    )


def identify_network(path: Path) -> str:
    """Return the name and the CRC-32 of a network with its description, as recorded in a store.

    Raises:
        UsageError: a file cannot be read, or the description is wrong.
    """
    read_segmenter(path)
    try:
        crc = zlib.crc32(description_of(path).read_bytes(), zlib.crc32(path.read_bytes()))
    except OSError as error:
        raise UsageError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    return f"{path.name}, crc32 {crc:08x}"


@functools.lru_cache(maxsize=1)
def load_network(path: Path, _modified: int) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """Return a function from (B, S, S, 3) uint8 to (B, S, S) probabilities; loaded once per process."""
    network = read_segmenter(path)
    call = _onnx(path) if path.suffix.lower() == ".onnx" else _keras(path)
    mean, std = np.array([network.mean, network.std], np.float32)

    def run(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        values = pixels if network.of_run else (pixels / np.float32(255) - mean) / std
        ordered = values.transpose(0, 3, 1, 2) if network.layout == "NCHW" else values
        maps = call(np.asarray(ordered, np.uint8 if network.of_run else np.float32))
        maps = maps[:, None] if maps.ndim == 3 else maps
        channels = (
            maps if network.layout == "NCHW" or maps.shape[1] == 1 else maps.transpose(0, 3, 1, 2)
        )
        if (
            channels.ndim != 4
            or channels[:, 0].shape != (len(pixels), network.size, network.size)
            or (channels.shape[1] > 1 and network.class_index >= channels.shape[1])
        ):
            raise UsageError(
                f"{path}: wrong output",
                found=f"shape {maps.shape}",
                expected=f"one map of {network.size}×{network.size} per class, as {network.layout}, "
                f"and class {network.class_index}",
            )
        probabilities = _probabilities(np.asarray(channels, np.float32), network)
        if np.isnan(probabilities).any():
            raise MaskUnfit(f"{path}: the network computed NaN", expected="probabilities or logits")
        return probabilities

    return run


def check_network(path: Path) -> float:
    """Run a network on black pixels; return the seconds for 1 cm² of a slide. A task for a worker process. Raise any error."""
    network = read_segmenter(path)
    run = load_network(path, path.stat().st_mtime_ns)
    pixels = np.zeros((_BATCH, network.size, network.size, 3), np.uint8)
    run(pixels[:1])
    began = time.monotonic()
    run(pixels)
    step = network.size - network.size // _OVERLAP
    return (time.monotonic() - began) / _BATCH * (1e4 / network.mpp / step) ** 2


def _probabilities(channels: NDArray[np.float32], network: Segmenter) -> NDArray[np.float32]:
    """Return the probability of tissue, (B, S, S), from maps of (B, C, S, S)."""
    single = channels.shape[1] == 1
    values = channels[:, 0 if single else network.class_index]
    if network.output == "probabilities":
        return np.clip(values, 0, 1)
    if single:
        return np.asarray(1 / (1 + np.exp(-np.clip(values, -50, 50))), np.float32)
    powers = np.exp(channels - channels.max(axis=1, keepdims=True))
    return np.asarray(powers[:, network.class_index] / powers.sum(axis=1))


def _onnx(path: Path) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    with needs_extra("onnx", "onnxruntime is not installed"):
        import onnxruntime  # late: an extra
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # each worker process has one core
    # onnxruntime's errors have no other common base class than Exception.
    with reported_as(UsageError, f"{path} cannot be loaded", Exception, reason=first_line):
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    name = session.get_inputs()[0].name

    def call(values: NDArray[np.float32]) -> NDArray[np.float32]:
        # One by one: many networks are exported with a batch of one.
        inputs = ({name: np.ascontiguousarray(one[None])} for one in values)
        with reported_as(UsageError, f"{path} cannot be run", Exception, reason=first_line):
            return np.concatenate([np.asarray(session.run(None, one)[0]) for one in inputs])

    return call


def _keras(path: Path) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    from histopipe.system.tensorflow import load_quietly

    keras = load_quietly("keras")
    with reported_as(
        UsageError,
        f"{path} cannot be loaded",
        (OSError, ValueError, TypeError, KeyError),
        reason=first_line,
    ):
        model = keras.saving.load_model(path, compile=False, safe_mode=True)
    # A ReLU layer turns NaN into 0, so that the output may not show it.
    if not all(np.isfinite(weights).all() for weights in model.get_weights()):
        raise UsageError(f"{path}: a weight is not finite", todo="use another network")
    return lambda values: np.asarray(model.predict_on_batch(values), np.float32)


def find_by_network(
    path: Path, slide: Slide, name: str, mpp: Mpp | None, thumbnail: Thumbnail
) -> TissueMask:
    """Find the tissue of a slide by a network, on the grid of its thumbnail. `mpp` is that of level 0.

    Raises:
        ScaleError: the scale of the slide is unknown, or coarser than that of the network.
        UsageError: the network cannot be used.
        MachineShort: its library is not installed.
    """
    network = read_segmenter(path)
    if mpp is None or mpp > network.mpp * (1 + SCALE_TOLERANCE):
        raise ScaleError(
            f"{name} cannot be segmented by {path.name}",
            found=f"mpp {mpp}",
            expected=f"at most {network.mpp:g}",
        )
    grid, bounds = Grid.of(thumbnail, slide.info.size), slide.info.bounds
    scale = network.mpp / mpp  # level-0 pixels per pixel of the network
    size = Size(max(1, round(bounds.size.width / scale)), max(1, round(bounds.size.height / scale)))
    if size.area > _LARGEST_MAP:
        raise ScaleError(
            f"{name} is too large for {path.name}", found=f"{size} pixels at {network.mpp:g} mpp"
        )
    # What cannot be read may be tissue: its patches are planned, and recorded as unreadable if reading fails again.
    probabilities = np.full((size.height, size.width), 255, np.uint8)
    run = load_network(path, path.stat().st_mtime_ns)
    step = network.size - network.size // _OVERLAP  # distance of tiles in pixels
    # The tiles begin before the parts of the image that are kept of them, so that each border is inside a tile.
    margin = (network.size - step) // 2
    places = [(x, y) for y in range(0, size.height, step) for x in range(0, size.width, step)]
    for start in range(0, len(places), _BATCH):
        tiles = {}
        for x, y in places[start : start + _BATCH]:
            with suppress(SlideUnreadable):
                tiles[x, y] = _tile(slide, network, mpp, x - margin, y - margin)
        results = run(np.stack([*tiles.values()])) if tiles else ()
        for (x, y), result in zip(tiles, results, strict=True):
            part = probabilities[y : y + step, x : x + step]
            middle = result[margin : margin + part.shape[0], margin : margin + part.shape[1]]
            part[...] = np.round(middle * 255)
    source = Grid(bounds.origin.x, bounds.origin.y, scale, size, grid.slide)
    tissue = _at(probabilities, source, grid) >= network.threshold * 255
    return with_lost_areas(TissueMask(tissue, network.threshold), thumbnail)


def _tile(slide: Slide, network: Segmenter, mpp: Mpp, x: int, y: int) -> NDArray[np.uint8]:
    """Read a tile; (x, y) are pixels of the network. Outside the scanned area, the border is repeated."""
    scale, bounds = network.mpp / mpp, slide.info.bounds
    level = thumbnail_level(slide.info.levels, mpp, network.mpp)
    left, top = max(0.0, x * scale), max(0.0, y * scale)
    right = min(float(bounds.size.width), (x + network.size) * scale)
    bottom = min(float(bounds.size.height), (y + network.size) * scale)
    extent = (right - left, bottom - top)
    size = Size(*(max(1, round(length / level.downsample)) for length in extent))
    origin = PointL0(bounds.origin.x + round(left), bounds.origin.y + round(top))
    inner = [max(1, round(length / scale)) for length in extent]
    pixels = slide.read_region(origin, level.number, size)
    small = cv2.resize(pixels, inner, interpolation=cv2.INTER_AREA)
    before, above = max(0, -x), max(0, -y)
    after, below = max(0, network.size - before - inner[0]), max(0, network.size - above - inner[1])
    whole = cv2.copyMakeBorder(small, above, below, before, after, cv2.BORDER_REPLICATE)
    return np.asarray(whole[: network.size, : network.size], np.uint8)


def _at(probabilities: NDArray[np.uint8], source: Grid, grid: Grid) -> NDArray[np.uint8]:
    """Return probabilities on the grid of the thumbnail: averaged if it is coarser, else interpolated."""
    width, height = (
        max(1, round(count * grid.side / source.side))
        for count in (grid.size.width, grid.size.height)
    )
    fitted = np.pad(
        probabilities[:height, :width],
        ((0, max(0, height - probabilities.shape[0])), (0, max(0, width - probabilities.shape[1]))),
        mode="edge",
    )
    filtering = cv2.INTER_AREA if grid.side > source.side else cv2.INTER_LINEAR
    size = (grid.size.width, grid.size.height)
    return np.asarray(cv2.resize(fitted, size, interpolation=filtering), np.uint8)
