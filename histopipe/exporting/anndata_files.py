"""Export features as AnnData files, which scanpy and squidpy read: with positions, labels and predictions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.errors import NothingToDo, SlideError, UsageError, needs_extra
from histopipe.exporting.patches import ExportResult
from histopipe.features.feature_file import feature_files, read_header, read_places
from histopipe.features.feature_sets import SlideFeatures, check_level, read_encoder
from histopipe.predictions.patch_values import ReadValues, open_stores, open_values
from histopipe.predictions.sources import SETTINGS
from histopipe.runs.folder import check_one_run
from histopipe.runs.run import METRICS, open_source
from histopipe.system.files import (
    atomic_write,
    file_sha256,
    make_folder,
    path_within,
    reading,
    roomy,
)
from histopipe.system.output import Progress, counted, slide_failure, some

SUFFIX = ".h5ad"
_SIDE = 64
"""Longer side of the empty picture in pixels."""


def export_h5ad(
    features: Path, *, out: Path, predictions: Path | None, progress: Progress
) -> ExportResult:
    """Write the features of each slide as `SLIDE.h5ad`; files that exist are kept.

    `X` has the features, (N, D) float32. `obs` has slide, patient, label and site, the corner of the patch, its side with
    its origin ("recorded", "neighbours" or "unknown"), and with predictions the values of each class (a / in its name
    becomes _), or attention and contributions; NaN for patches without. `obsm["spatial"]` has the centres, (N, 2), in
    level-0 pixels, or the corners if the side is unknown; `uns["spatial"]` the side of the patches, and `uns["encoder"]` a
    JSON text. Places with another unit keep it.

    Raises:
        UsageError: the folder has vectors of slides, or the predictions cannot be read.
        NothingToDo: there are no features.
        MachineShort: anndata is not installed.
    """
    with needs_extra("h5ad", "h5ad files need anndata, which is not installed"):
        import anndata  # late: the extra [h5ad]
    files, failed, kept, rows = feature_files(features), dict[str, str](), 0, 0
    if not files:
        raise NothingToDo(f"{features} has no features", todo="run `histopipe embed`")
    unknown: list[str] = []
    source = "" if predictions is None else _digest(predictions)
    records = {"encoder": json.dumps(read_encoder(features)), "predictions": source}
    with ExitStack() as stack:
        predicted, read_values = _open_predictions(predictions, stack, progress)
        if predictions is not None and not {*files} & {*predicted}:
            raise UsageError(
                f"--predictions {predictions}: no slide of {features}",
                found=", ".join([*predicted][:3]),
                expected=f"slides such as {next(iter(files))}",
            )
        make_folder(out)
        stack.enter_context(roomy(out))
        bar = stack.enter_context(progress.bar("exporting", unit="slides", total=len(files)))
        for slide, file in files.items():
            path = path_within(out, f"{slide}{SUFFIX}")
            try:
                if path.exists():
                    _check_predictions(anndata, path, source)
                    kept += 1
                    continue
                read = read_values if slide in predicted else None
                values = _annotated(anndata, slide, SlideFeatures((read_header(file),)), read)
                unknown += [slide] * bool((values.obs["side_from"] == "unknown").any())
                values.uns.update(records)
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as part:
                    values.write_h5ad(part)
                rows += values.n_obs
            except Exception as error:  # noqa: BLE001 - `slide_failure` raises what concerns all slides
                failed[slide] = slide_failure(error)
            bar.advance()
    if unknown:
        progress.message(
            f"the side of the patches of {counted(len(unknown), 'slide')} is unknown, and places are corners: {some(unknown, 3)}"
        )
    return ExportResult(out, len(files) - kept - len(failed), kept, rows, (), failed)


def _open_predictions(
    folder: Path | None, stack: ExitStack, progress: Progress
) -> tuple[Collection[str], ReadValues | None]:
    """Return the ids of the slides with values in a folder, and the function that reads them."""
    if folder is None:
        return (), None
    check_one_run(folder)
    source = open_source(folder)
    opened, missing = open_stores(source, (), stack)
    for reason in missing:
        progress.message(f"warning: {reason}")
    return open_values(source, opened, None)


def _digest(predictions: Path) -> str:
    """Return the SHA-256 of what a folder of predictions, or a run, records."""
    settings = predictions / SETTINGS
    return file_sha256(settings if settings.exists() else predictions / METRICS)


def _check_predictions(anndata: Any, path: Path, source: str) -> None:
    """Raise a SlideError if a file that exists was written with other predictions."""
    with reading(path):
        opened = anndata.read_h5ad(path, backed="r")
        written = opened.uns.get("predictions", "")
        opened.file.close()
    if written != source:
        raise SlideError(
            f"{path} exists",
            found="other --predictions" if written else "no --predictions",
            expected="these --predictions" if source else "no --predictions",
            todo="remove it, or choose another --out",
        )


def _annotated(anndata: Any, slide: str, part: SlideFeatures, read: ReadValues | None) -> Any:
    """Return the features of a slide as AnnData."""
    import pandas as pd

    check_level([part], vectors=False)
    header = part.headers[0]
    features = part.read().astype(np.float32)
    corners = np.array(np.nan) if header.unplaced == "no coords" else read_places(header)
    if not np.isfinite(corners).all():
        expected = "positions of the patches"
        raise SlideError(f"{header.path}", found=header.unplaced, expected=expected)
    corners = corners if header.unplaced else corners.astype(np.int64)
    x, y = corners.T
    origin = "recorded" if header.recorded_side else "neighbours" if header.side else "unknown"
    unit = header.unplaced.partition("coords in ")[2] or "l0"
    texts = {"slide": slide, **{n: header.text(n) for n in ("patient", "label", "site")}}
    columns = {
        **{n: pd.Categorical([text or ""] * len(x)) for n, text in texts.items()},
        f"x_{unit}": x,
        f"y_{unit}": y,
        f"side_{unit}": np.full(len(x), header.side or np.nan),
        "side_from": pd.Categorical([origin] * len(x)),
        **_values_at(corners.tolist(), header.side, slide, read),
    }
    names = pd.Series([f"{slide}_{left}_{top}" for left, top in corners.tolist()], dtype=str)
    copies = names.groupby(names).cumcount()
    names += ("-" + copies.astype(str)).where(copies > 0, "")
    # squidpy draws over a picture: an empty one of the extent of the patches.
    extent = np.max(corners, axis=0, initial=0) + (header.side or 1.0)
    reduced = _SIDE / extent.max()
    empty = np.full((*np.ceil(extent[::-1] * reduced).astype(int), 3), 255, np.uint8)
    scale = {"spot_diameter_fullres": header.side or 1.0, "tissue_hires_scalef": reduced}
    return anndata.AnnData(
        features,
        obs=pd.DataFrame(columns).set_index(names.rename(None)),
        obsm={"spatial": corners + header.side / 2},
        uns={
            "spatial": {
                slide.replace("/", "_"): {"images": {"hires": empty}, "scalefactors": scale}
            }
        },
    )


def _values_at(
    corners: list[list[int]], side: float, slide: str, read: ReadValues | None
) -> Mapping[str, Any]:
    """Return the predicted values of patches at (N,) corners by name; NaN for those without.

    Raises:
        SlideError: the values are of patches with another side.
    """
    values = None if read is None else read(slide)
    if values is None:
        return {}
    if side and abs(values.slide.size_l0 - side) >= 1:
        raise SlideError(
            f"{slide}: the predictions are of other patches",
            found=f"{values.slide.size_l0:g} level-0 pixels",
            expected=f"{side:g}, as the features",
        )
    places = zip(values.x_l0.tolist(), values.y_l0.tolist(), strict=True)
    row_of = {place: row for row, place in enumerate(places)}
    rows = np.array([row_of.get((x, y), -1) for x, y in corners])
    return {
        name.replace("/", "_"): np.where(rows < 0, np.nan, numbers[rows]).astype(np.float32)
        for name, numbers in values.measures.items()
    }
