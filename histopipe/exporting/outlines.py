"""Export the classes of patches as outlines for QuPath."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.annotations.regions import merged_squares
from histopipe.errors import NothingToDo
from histopipe.exporting.patches import ExportResult
from histopipe.slides.slide import Turn
from histopipe.store.store import Store
from histopipe.system.files import path_within, roomy, writable, write_atomically
from histopipe.system.output import Progress, default_progress


def export_outlines(store: Path, *, out: Path, progress: Progress | None = None) -> ExportResult:
    """Write `SLIDE.geojson` for each slide with labelled patches: an annotation per group of neighbours of a class.

    Coordinates are in the frame of the file's pixels, from the corner of the scanned area, as QuPath has them.

    Raises:
        NothingToDo: no patch has a class.
        DamagedStore: the store cannot be read.
    """
    display, files, patches = progress or default_progress(), 0, 0
    with Store(store) as opened, writable(out), roomy(out):
        complete, classes = opened.complete, opened.classes
        with display.bar("outlines", unit="slides", total=len(complete)) as bar:
            for number, record in complete.items():
                bar.advance()
                index = opened.index(number)
                label = index["label"]
                origin, size = record.frame_bounds.origin, record.frame_bounds.size
                corners = np.stack([index["x_l0"] - origin.x, index["y_l0"] - origin.y], axis=1)
                if record.orientation:
                    turn = Turn(record.orientation, size)
                    corners = turn.stored(corners, record.side_l0)
                features: list[dict[str, Any]] = []
                for of_class in np.unique(label[label >= 0]).tolist():
                    x, y = corners[label == of_class].T
                    features += [
                        {
                            "type": "Feature",
                            "geometry": group.__geo_interface__,
                            "properties": {
                                "objectType": "annotation",
                                "classification": {"name": classes[of_class]},
                            },
                        }
                        for group in merged_squares(x, y, record.side_l0)
                    ]
                if features:
                    path = path_within(out, f"{record.id}.geojson")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    content = {"type": "FeatureCollection", "features": features}
                    write_atomically(path, json.dumps(content, separators=(",", ":")))
                    files, patches = files + 1, patches + int((label >= 0).sum())
    if not files:
        raise NothingToDo(f"no patch of {store} has a class", todo="run histopipe annotate first")
    return ExportResult(out, files, 0, patches, ())
