"""Compute one vector per slide or patient from the features of its patches, by a slide encoder."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.bags import Bag, BagSet
from histopipe.errors import DamagedStore, Interrupted, OutOfMemory, UsageError
from histopipe.features.feature_file import (
    SOURCE_CRC,
    feature_path,
    read_features,
    read_header,
    write_vector,
)
from histopipe.features.feature_sets import SlideFeatures, check_level, read_encoder, record_encoder
from histopipe.inference.encoder import versions
from histopipe.inference.feature_folders import describe_slides, record_slides
from histopipe.inference.options import EmbedOptions, refuse_options
from histopipe.predictions.prediction_tables import patch_value_file, write_patch_values
from histopipe.predictions.sources import PredictionsFolder
from histopipe.pretrained.encoders import find_weights
from histopipe.pretrained.presets import SUFFIX, Preset, slide_preset, slide_preset_names
from histopipe.splits.slide_table import SlideEntry
from histopipe.system.files import file_sha256, roomy
from histopipe.system.output import Progress, slide_failure
from histopipe.system.settings import declared_settings
from histopipe.system.table_files import write_table
from histopipe.system.tensorflow import load_quietly

if TYPE_CHECKING:
    from histopipe.inference.networks import TrainedBags

VECTORS = "vectors.csv"
"""Table of all vectors of a folder."""
_APPLIED = ("model", "weights", "devices", "precision", "allow_mismatch", "bag", "attention")
"""Options of `embed` that apply to slide encoders."""
OF_PATCHES = "of"
"""Key of the record of the patch encoder in that of a slide encoder."""


@dataclass(slots=True)
class SlideVectors:
    """A slide encoder, and the features of patches that it is applied to.

    Raises:
        UsageError: features, weights or options do not fit.
        MachineShort: TensorFlow is not installed.
    """

    folder: Path
    options: EmbedOptions
    preset: Preset = field(init=False)
    record: dict[str, Any] = field(init=False)
    """What vectors depend on, for `features.json`."""
    bags: dict[str, Bag] = field(default_factory=dict)
    """Patches of each slide or patient, by its id."""
    _encoder: Any = field(init=False)
    _kind: Any = field(init=False)
    """Class of the patches of a slide; loaded here, since the threads of devices must not import TensorFlow's modules."""

    def __post_init__(self) -> None:
        options, name = self.options, self.options.encoder
        preset = _chosen(options, self.folder)
        self.preset, of = preset, read_encoder(self.folder)
        if of is not None and OF_PATCHES in of:
            raise UsageError(
                f"{self.folder}",
                found=f"vectors of {of['encoder']}",
                expected="features of patches",
            )
        path = find_weights(preset, Path(options.weights[0]))
        self._encoder = load_quietly("histopipe.training.slide_encoder").load_slide_encoder(
            preset.slide_network, path, devices=options.devices, precision=options.precision
        )
        self._kind = load_quietly("histopipe.training.slide_encoder").PlacedPatches
        places = {"model": name, "weights": str(options.weights[0])}
        self.record = {
            "encoder": preset.name,
            "sha256": file_sha256(path),
            "precision": options.precision,
            "dimension": preset.dimension,
            "level": options.bag,
            OF_PATCHES: of or {},
            "of_sha256": (of or {}).get("sha256"),
            "features": str(self.folder.absolute()),
            "patches": (of or {}).get("patches"),
            "libraries": versions(),
            "given": {
                **{n: getattr(options, n) for n in ("precision", "allow_mismatch", "bag")},
                "model": name,
                **{
                    n: str(Path(p).absolute())
                    for n, p in places.items()
                    if n == "weights" or p.endswith(SUFFIX)
                },
            },
        }

    def write(self, out: Path, progress: Progress) -> dict[str, Any]:
        """Write the vectors that are missing in a folder, and the tables. Return the fields of an `EmbedResult`."""
        bags = BagSet(
            self.folder,
            bag=self.options.bag,
            unlabelled=True,
            on_error="skip",
        )
        check_level((part for bag in bags for part in bag.parts), vectors=False)
        mismatch = self.preset.check_features(
            read_encoder(self.folder),
            bags.dimension,
            self.folder,
            sides_um=(
                header.side_um for bag in bags for part in bag.parts for header in part.headers
            ),
            allowed=self.options.allow_mismatch,
        )
        if mismatch:
            self.record["mismatch"] = mismatch
        self.bags = {bag.id: bag for bag in bags}
        with roomy(out), self.options.share.held(out):
            record_encoder(out, self.record)
            return _run(self, bags, out, progress)

    def patches_of(self, part: SlideFeatures) -> Any:
        """Return the patches of a slide for the encoder."""
        corners = part.corners()
        places = None if corners is None else corners.astype(np.float64)
        return self._kind(part.read().astype(np.float32), places, part.headers[0].side)

    def encode(self, bag: Bag, device: str | None = None) -> Encoded:
        """Return the vector of a slide or patient, and the attention of each patch."""
        vectors, attention = zip(
            *(self._encoder.encode(self.patches_of(part), device) for part in bag.parts),
            strict=True,
        )
        shares = None
        if attention[0] is not None:
            shares = (np.concatenate(attention) / len(bag.parts)).astype(np.float32)
        if self.options.bag == "slide":
            return Encoded(bag, vectors[0], shares)
        return Encoded(bag, self._encoder.encode_patient(np.stack(vectors)), shares)

    def write_patches(
        self,
        predictions: PredictionsFolder,
        bag: Bag,
        rows: NDArray[np.floating],
        models: Sequence[TrainedBags],
        *,
        regions: int,
    ) -> None:
        """Write attention and mean contributions of the patches of a bag of (R, D) vectors; see `SlideEncoder`."""
        slopes = np.concatenate([model.slopes(rows) for model in models])
        parts, shares = [], []
        for row, slide in enumerate(bag.slides):
            of_patches = self.bags[slide]
            describe_slides(predictions, of_patches)
            part, attention = self._encoder.contributions(
                [*map(self.patches_of, of_patches.parts)],
                slopes[:, row],
                regions=regions,
                patient=self.options.bag == "patient",
            )
            parts.append(part)
            shares.append(attention)
        each = np.split(np.concatenate(parts), len(models), axis=1)
        named = [model.named(part) for model, part in zip(models, each, strict=True)]
        write_patch_values(
            predictions.folder,
            bag.id,
            chain.from_iterable(self.bags[slide].places() for slide in bag.slides),
            names=models[0].task.names if regions else (),
            attention=None if shares[0] is None else np.concatenate(shares) / len(shares),
            contributions=np.mean(named, axis=0)[:, : None if regions else 0],
        )

    def all(
        self, bags: Sequence[Bag], failed: Callable[[Bag, Exception], None]
    ) -> Generator[Encoded]:
        """Yield the vectors of bags, computed on all devices at once, in any order."""
        free: SimpleQueue[str] = SimpleQueue()
        for device in self._encoder.devices:
            free.put(device)

        def encode(bag: Bag) -> Encoded | tuple[Bag, Exception]:
            device = free.get()
            try:
                return self.encode(bag, device)
            except Exception as error:  # noqa: BLE001 - reported by slide
                return bag, error
            finally:
                free.put(device)

        pool = ThreadPoolExecutor(len(self._encoder.devices), "histopipe-slides")
        try:
            for result in pool.map(encode, bags):
                if isinstance(result, Encoded):
                    yield result
                else:
                    failed(*result)
        finally:
            pool.shutdown(cancel_futures=True)


def _chosen(options: EmbedOptions, folder: Path) -> Preset:
    """Return the slide encoder of the options, for features in a folder. Raise a UsageError if they do not fit."""
    name = options.encoder
    preset = slide_preset(name)
    if preset is None:
        raise UsageError(
            f"--model {name or '(none)'}",
            found=f"features in {folder}",
            expected=f"a slide encoder: {', '.join(slide_preset_names())}, or a TOML file of one",
            todo="name stores or slides to compute features of patches",
        )
    refuse_options(
        options,
        declared_settings(EmbedOptions).keys() - _APPLIED,
        found=f"--model {name}, a slide encoder",
        todo="leave it out",
    )
    if len(options.model) > 1 or len(options.weights) > 1:
        raise UsageError("--model, --weights", found="several", expected="one slide encoder")
    if options.attention and not preset.slide_network.has_attention:
        raise UsageError(
            "--attention",
            found=f"{name}, which has none for patches",
            todo="leave it out: contributions show which patches matter, see `histopipe predict`",
        )
    if not options.weights:
        raise UsageError(
            "--weights",
            found="none",
            expected=f"the file of the weights of {name}",
            todo=f"see `histopipe encoders {name}`",
        )
    return preset


@dataclass(frozen=True, slots=True)
class Encoded:
    """The vector of a bag, and the (N,) attention of its patches if the encoder has one."""

    bag: Bag
    vector: NDArray[np.float32]
    attention: NDArray[np.float32] | None


def takes_vectors(record: Mapping[str, Any] | None) -> bool:
    """Return whether features with this record are vectors of a slide encoder."""
    return record is not None and OF_PATCHES in record


def refuse_for_patches(options: EmbedOptions) -> None:
    """Raise a UsageError if an option is given that applies to slide encoders only, or the model is one."""
    refuse_options(options, ("bag", "attention"), found="patches", todo="leave it out")
    for name in map(str, options.model):
        preset = slide_preset(name)
        if preset is not None:
            raise UsageError(
                f"--model {name}, a slide encoder",
                found="stores or slides",
                expected="a folder of features of patches",
                todo=f"run `histopipe embed` with --model {preset.patch_encoders[0]} first",
            )


def _run(vectors: SlideVectors, bags: BagSet, out: Path, progress: Progress) -> dict[str, Any]:
    began, done, dimension = time.monotonic(), list[str](), vectors.preset.slide_network.dimension
    failed = {**bags.failed, **dict.fromkeys(bags.empty, "the slide has no patches")}
    missing = [b for b in bags if not _is_complete(vectors, b, out)]
    kept = {bag.id for bag in bags} - {bag.id for bag in missing}

    def note(bag: Bag, error: Exception) -> None:
        is_memory = load_quietly("histopipe.training.devices").is_out_of_memory(error)
        failed[bag.id] = (
            f"memory ran out with {bag.rows:,} patches"
            if is_memory or isinstance(error, OutOfMemory)
            else slide_failure(error)
        )
        progress.message(f"{bag.id}: failed: {failed[bag.id]}")

    with (
        progress.bar("embedding", unit=f"{vectors.options.bag}s", total=len(missing)) as bar,
        closing(vectors.all(missing, note)) as results,
    ):
        try:
            for encoded in results:
                _write(vectors, encoded, out)
                done.append(encoded.bag.id)
                bar.advance()
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted",
                found=f"{len(done)} {vectors.options.bag}s done",
                todo="run the same command again to continue",
            ) from None
    for name in failed:
        feature_path(out, name).unlink(missing_ok=True)  # of earlier features
    _record(bags, out, failed)
    return {
        "folder": out,
        "done": tuple(done),
        "kept": tuple(sorted(kept)),
        "failed": failed,
        "patches": sum(bag.rows for bag in missing if bag.id not in failed),
        "skipped": 0,
        "seconds": time.monotonic() - began,
        "input_wait": 0.0,
        "shares": {},
        "dimension": dimension,
        "each": (dimension,),
        "unit": vectors.options.bag,
    }


def _is_complete(vectors: SlideVectors, bag: Bag, out: Path) -> bool:
    """Return whether the folder has the vector of exactly these features, and attention if asked for."""
    path = feature_path(out, bag.id)
    with suppress(DamagedStore):
        if path.exists() and read_header(path).attributes.get(SOURCE_CRC) == _source_crc(bag):
            return not vectors.options.attention or patch_value_file(out, bag.id).exists()
    path.unlink(missing_ok=True)  # of other features
    return False


def _source_crc(bag: Bag) -> int:
    """Return a checksum of features and places of the patches."""
    corners = [(part.corners(), part.headers[0].side) for part in bag.parts]
    places = [(None if xy is None else zlib.crc32(xy.tobytes()), side) for xy, side in corners]
    return zlib.crc32(repr((bag.crc, places)).encode())


def _write(vectors: SlideVectors, encoded: Encoded, out: Path) -> None:
    """Write the file of a vector, and if asked for, the attention and the place of each patch."""
    bag, record = encoded.bag, vectors.record
    attributes = {
        "slide": bag.id,
        "label": bag.label,
        "patient": bag.patient or bag.id,
        "site": bag.site,
        **(bag.scans[0].values() if len(bag.slides) == 1 else {}),  # two scans have no hash shares
        SOURCE_CRC: _source_crc(bag),
        "encoder": record["encoder"],
        "encoder_sha256": record["sha256"],
        "precision": record["precision"],
    }
    if vectors.options.attention and encoded.attention is not None:
        write_patch_values(
            out,
            bag.id,
            bag.places(),
            names=(),
            attention=encoded.attention,
            contributions=np.zeros((len(encoded.attention), 0)),
        )
        describe_slides(PredictionsFolder(out), bag)
    write_vector(feature_path(out, bag.id), encoded.vector, vectors.options.bag, attributes)


def _record(bags: BagSet, out: Path, failed: Mapping[str, str]) -> None:
    """Write the tables of slides and of vectors."""
    entries = [
        SlideEntry(
            slide=bag.id,
            patient=bag.patient or bag.id,
            site=bag.site or "",
            label=bag.label or "",
            label_source="folder or import" if bag.label else "",
            store=bags.path.name,
            planned=1,
            cells=dict(bag.cells),
        )
        for bag in bags
    ]
    unused = [entry for entry in bags.slides.values() if entry.reason is not None]
    record_slides(out, [*entries, *unused], failed)
    rows = []
    for bag in bags:
        path = feature_path(out, bag.id)
        if path.exists():
            values = read_features(read_header(path))[0].tolist()
            names = (bag.id, bag.patient or bag.id, bag.label or "")
            rows.append((*names, *(f"{value:.9g}" for value in values)))
    width = len(rows[0]) - 3 if rows else 0
    write_table(out / VECTORS, ["slide", "patient", "label", *map(str, range(width))], rows)
