"""The formats of `export`. Its checks and flags, `doctor` and docs/reference/formats.md are made from `EXPORTS`.

A new format is a function and its entry here. The module imports nothing slow, since `--help` lists the formats.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from histopipe.system.folders import FolderKind
from histopipe.system.parts import PartOptions
from histopipe.system.settings import PathLike, setting

_GROUP = "Options"
IndexFormat = Literal["csv", "parquet"]
FolderFormat = Literal[
    "tfrecord", "webdataset", "folder", "masks", "outlines", "onnx", "keras", "h5ad"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A format of `export`.

    Attributes:
        content: what is written, for `--help` and the documentation.
        function: MODULE:FUNCTION in this package. It takes the folder to export, or a list of stores for an index, and as
            keywords `out` and the options.
        options: `shard_patches`, `predictions` and `progress` of `export`; `to`, the name of the format; `share`, the part of
            the work, if several machines can divide it; and "url", no keyword, if `out` may be a URL.
        source: kind of the folder to export.
        index: it is a format of `--index`, a table of several stores; else one of `--to`.
        extra: extra that has the libraries.
    """

    content: str
    function: str
    options: tuple[str, ...]
    source: FolderKind = FolderKind.STORE
    index: bool = False
    extra: str | None = None

    def write(self, source: Any, **arguments: Any) -> Any:
        """Call the function with those of the arguments that it takes."""
        taken = arguments.keys() & {"out", *self.options}
        return pkgutil.resolve_name(f"histopipe.exporting.{self.function}")(
            source, **{name: arguments[name] for name in taken}
        )


_MODEL: dict[str, Any] = {
    "function": "exported_models:export_model",
    "options": ("to",),
    "source": FolderKind.RUN,
}
EXPORTS: Mapping[str, ExportFormat] = {
    "csv": ExportFormat(
        content="a table with one row per patch",
        function="export:export_index",
        options=("to", "progress"),
        index=True,
    ),
    "parquet": ExportFormat(
        content="the same table as Parquet",
        function="export:export_index",
        options=("to", "progress"),
        index=True,
        extra="parquet",
    ),
    "tfrecord": ExportFormat(
        content="a file per slide, with the feature names of slideflow; needs TensorFlow",
        function="patches:export_patches",
        options=("to", "share", "progress", "url"),
    ),
    "webdataset": ExportFormat(
        content="tar files of images with their JSON files",
        function="patches:export_patches",
        options=("to", "share", "progress", "url", "shard_patches"),
    ),
    "folder": ExportFormat(
        content="images by label and slide",
        function="patches:export_patches",
        options=("to", "share", "progress"),
    ),
    "masks": ExportFormat(
        content="GeoJSON for QuPath and PNG, as of `histopipe tissue`",
        function="masks:export_masks",
        options=("share", "progress"),
    ),
    "outlines": ExportFormat(
        content="GeoJSON for QuPath: patches of a class, merged",
        function="outlines:export_outlines",
        options=("progress",),
    ),
    "onnx": ExportFormat(content="the model, with a description", extra="onnx", **_MODEL),
    "keras": ExportFormat(content="the model as Keras saves it, with a description", **_MODEL),
    "h5ad": ExportFormat(
        content="a file per slide for scanpy and squidpy",
        function="anndata_files:export_h5ad",
        options=("predictions", "progress"),
        source=FolderKind.FEATURES,
        extra="h5ad",
    ),
}
"""All formats by name."""


def formats_by_source() -> Mapping[FolderKind, Sequence[str]]:
    """Return the names of the formats of `--to` by the kind of folder that they export."""
    return {
        source: [name for name, each in EXPORTS.items() if each.source is source and not each.index]
        for source in dict.fromkeys(each.source for each in EXPORTS.values())
    }


def formats_text() -> str:
    """Return the formats of `--to` with their content, for `--help`."""
    return "; ".join(
        f"{source}: {', '.join(f'{name} ({EXPORTS[name].content})' for name in names)}"
        for source, names in formats_by_source().items()
    )


def flag_text(option: str) -> str:
    """Return the flags of the formats that take an option, such as "--to tfrecord or webdataset"."""
    return f"--to {' or '.join(name for name in EXPORTS if option in EXPORTS[name].options)}"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(PartOptions):
    """Options of `export`."""

    index: IndexFormat | None = setting(
        None, "Export a table with one row per patch into the file --out.", group=_GROUP
    )
    to: FolderFormat | None = setting(
        None,
        f"Format of the files in the folder --out, by what is exported: {formats_text()}.",
        group=_GROUP,
    )
    predictions: PathLike | None = setting(
        None,
        f"With {flag_text('predictions')}: add the values of patches in this folder of predictions, or run.",
        group=_GROUP,
        format="path",
    )
    shard_patches: int = setting(
        10_000,
        f"Patches per file of {flag_text('shard_patches')}.",
        group=_GROUP,
        at_least=1,
    )
