"""Files that choose the patches of a slide: outlines, networks and coordinates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from histopipe.geometry import RegionL0
from histopipe.tiling.mask import Grid, Mask
from histopipe.tiling.mask_files import read_mask_file


def feature(rings: list[list[tuple[float, float]]], name: str | None = "Tissue") -> dict[str, Any]:
    """Return a GeoJSON feature: a polygon with a class."""
    properties = {} if name is None else {"classification": {"name": name}}
    geometry = {"type": "Polygon", "coordinates": rings}
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def box(left: float, top: float, right: float, bottom: float) -> list[tuple[float, float]]:
    """Return the ring of a rectangle."""
    return [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]


def make_network(path: Path, size: int, /, **settings: Any) -> None:
    """Write an ONNX network with two maps: glass, and tissue where the green channel is below 200 of 255."""
    weights = np.zeros((2, 3, 1, 1), np.float32)
    weights[1, 1] = -100
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["maps"])]
    graph = helper.make_graph(
        nodes,
        "segmenter",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, size, size])],
        [helper.make_tensor_value_info("maps", TensorProto.FLOAT, [1, 2, size, size])],
        [
            numpy_helper.from_array(weights, "w"),
            numpy_helper.from_array(np.array([0, 100 * 200 / 255], np.float32), "b"),
        ],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path
    )
    described = {"mpp": 8, "size": size, "layout": "NCHW"} | settings
    path.with_suffix(".json").write_text(json.dumps(described))


def write_coords(path: Path, corners: Any, **attributes: Any) -> None:
    """Write a file of patch coordinates, as other tools do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("coords", data=np.array(corners, np.int64).reshape(-1, 2))
        dataset.attrs.update(attributes)


def read_mask(path: Path, slide: str, grid: Grid, bounds: RegionL0, **options: Any) -> Mask:
    """Read a mask of which only one frame is possible; see `read_mask_file`."""
    (mask,) = read_mask_file(path, slide, grid, bounds, **options).by_frame.values()
    return mask
