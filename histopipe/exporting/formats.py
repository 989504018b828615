"""Formats of exported patches: one function per format."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from histopipe.store.record import SlideRecord
from histopipe.system.tensorflow import load_quietly


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch to be exported: its slide's record, its number there, its JPEG or PNG file, and its row of the index."""

    COLUMNS: ClassVar = ("x_l0", "y_l0", "tissue", "focus")

    record: SlideRecord
    row: int
    value: bytes
    index: Mapping[str, Any]

    @property
    def suffix(self) -> str:
        """Suffix of its file."""
        return "jpg" if self.value[:2] == b"\xff\xd8" else "png"

    @property
    def corner(self) -> tuple[int, int]:
        """Top left corner, level-0 pixels."""
        return int(self.index["x_l0"]), int(self.index["y_l0"])

    @property
    def side_l0(self) -> int:
        """Side in level-0 pixels; 0 if unknown."""
        return round((self.record.read_size or 0) * (self.record.downsample or 0))

    def to_json(self) -> dict[str, Any]:
        """Return slide, position and measurements as a JSON-ready dict."""
        x, y = self.corner
        record = self.record
        known = {
            "slide": record.id, "patient": record.patient, "site": record.site, "label": record.label,
            "patch": self.row, "x_l0": x, "y_l0": y, "size_l0": self.side_l0, "mpp": record.patch_mpp,
            "tissue": float(self.index["tissue"]), "focus": float(self.index["focus"]),
        }  # fmt: skip
        # JSON has no NaN.
        return {name: None if value != value else value for name, value in known.items()}  # noqa: PLR0124


def write_tfrecord(path: Path, patches: Iterable[Patch]) -> None:
    """Write TFRecords of `slide`, `image_raw`, `loc_x`, `loc_y` (centre, level-0 pixels), as slideflow reads them."""
    tf = load_quietly("tensorflow")

    def texts(value: bytes) -> Any:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    def number(value: int) -> Any:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    with tf.io.TFRecordWriter(str(path)) as writer:
        for patch in patches:
            x, y = patch.corner
            feature = {
                "slide": texts(patch.record.id.encode()),
                "image_raw": texts(patch.value),
                "loc_x": number(x + patch.side_l0 // 2),
                "loc_y": number(y + patch.side_l0 // 2),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


def write_tar(path: Path, patches: Iterable[Patch]) -> None:
    """Write a tar file with `SLIDE/ROW.jpg` and `SLIDE/ROW.json` for each patch: one webdataset sample per patch."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for patch in patches:
            name = f"{patch.record.id}/{patch.row:06d}"
            description = json.dumps(patch.to_json(), ensure_ascii=False).encode()
            for suffix, value in ((patch.suffix, patch.value), ("json", description)):
                entry = tarfile.TarInfo(f"{name}.{suffix}")
                entry.size = len(value)
                archive.addfile(entry, io.BytesIO(value))


def write_folder(path: Path, patches: Iterable[Patch]) -> None:
    """Write a folder with `X_Y.jpg` for each patch, by its corner in level-0 pixels; `X_Y_ROW.jpg` if the corner is taken."""
    shutil.rmtree(path, ignore_errors=True)  # left by a killed process
    path.mkdir(parents=True)
    for patch in patches:
        x, y = patch.corner
        file = path / f"{x}_{y}.{patch.suffix}"
        if file.exists():  # imported coordinates may repeat
            file = path / f"{x}_{y}_{patch.row}.{patch.suffix}"
        file.write_bytes(patch.value)


WRITERS: Mapping[str, Callable[[Path, Iterable[Patch]], None]] = {
    "tfrecord": write_tfrecord,
    "webdataset": write_tar,
    "folder": write_folder,
}
