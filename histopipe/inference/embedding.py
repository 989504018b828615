"""An embedding under way: slide by slide, with batches loaded ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from histopipe.dataset.options import OnError, StainNorm
from histopipe.dataset.orders import Sequential
from histopipe.dataset.patch_batches import PatchBatches
from histopipe.dataset.sample_table import SampleRows, SampleTable
from histopipe.dataset.splits import patches_crc
from histopipe.errors import DamagedStore, Interrupted, UsageError
from histopipe.features.feature_file import Precision, is_ours, read_header, writing
from histopipe.features.folder import feature_path
from histopipe.inference.embed_result import EmbedResult
from histopipe.inference.encoder import Encoder
from histopipe.inference.feature_attributes import coords_facts, slide_facts
from histopipe.inference.stored_patches import COLUMNS, Normalise, load_piece
from histopipe.inference.stream import PatchStream, Piece
from histopipe.store.record import SlideRecord
from histopipe.store.store import Store
from histopipe.system.progress import default_progress, message
from histopipe.system.tensorflow import load_quietly


@dataclass(slots=True)
class _Slide:
    """A slide to embed."""

    rows: SampleRows
    record: SlideRecord
    batches: PatchBatches
    normalise: Normalise | None

    @property
    def steps(self) -> int:
        """Batches."""
        return self.batches.steps_per_epoch

    def load(self, step: int) -> Piece:
        """As `SlidePatches`."""
        return load_piece(self.batches, self.normalise, step)


@dataclass(slots=True)
class _Count:
    """What has been done."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    patches: int = 0
    skipped: int = 0
    seconds: float = 0.0
    input_wait: float = 0.0


class Embedding:
    """An embedding under way.

    A slide's batches hold its patches alone, so that its features depend on nothing else, and are the same whichever slides
    were done before.

    Args:
        stores: where the patches are.
        encoder: what they go through.
        folder: where the files go.
        precision, batch_size, stain_norm, on_error: see `embed`.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        encoder: Encoder,
        folder: Path,
        *,
        precision: Precision,
        batch_size: int,
        stain_norm: StainNorm,
        on_error: OnError,
    ) -> None:
        self._stores, self._encoder, self._folder = stores, encoder, folder
        self._precision: Precision = precision
        self._batch_size, self._on_error = batch_size, on_error
        self._normalise = None
        if stain_norm != "none":
            normaliser = load_quietly("histopipe.inference.stain")
            self._normalise = normaliser.numpy_normaliser(stores, stain_norm)

    def run(self, slides: Sequence[SampleRows]) -> EmbedResult:
        """Embed slides that are not there yet.

        Raises:
            HistopipeError: as `embed`.
        """
        missing = [self._slide(rows) for rows in slides if not self._is_there(rows)]
        kept = {self._record(rows).id for rows in slides} - {slide.record.id for slide in missing}
        if kept:
            message(f"{len(kept)} slides are there already")
        count, steps = _Count(), sum(slide.steps for slide in missing)
        with (
            closing(
                default_progress().bar("embedding", unit="steps", total=steps, detail=True)
            ) as progress,
            PatchStream(self._encoder, progress) as stream,
        ):
            began = time.monotonic()
            try:
                for number, (slide, results) in enumerate(stream.run(missing), 1):
                    name, told = slide.record.id, f"{number}/{len(missing)}"
                    try:
                        self._embed(slide, results, count)
                    except DamagedStore as error:
                        count.failed[name] = str(error)
                        message(f"{told} {name}: failed: {error}")
                    else:
                        count.done.append(name)
                        message(f"{told} {name}: {len(slide.batches.table):,} patches")
                    count.seconds = time.monotonic() - began
            except KeyboardInterrupt:
                raise Interrupted(
                    "interrupted", found=f"{len(count.done)} of {len(missing)} slides done",
                    todo="the same command goes on with the others",
                ) from None  # fmt: skip
            count.input_wait = stream.input_wait
        return EmbedResult(
            self._folder, self._encoder.dimension, tuple(count.done), tuple(sorted(kept)),
            count.failed, count.patches, count.skipped, count.seconds, count.input_wait,
        )  # fmt: skip

    def _slide(self, rows: SampleRows) -> _Slide:
        table = SampleTable([rows])
        batches = PatchBatches(
            self._stores, table, batch_size=self._batch_size, order=Sequential(len(table)),
            on_error=self._on_error, columns=COLUMNS,
        )  # fmt: skip
        return _Slide(rows, self._record(rows), batches, self._normalise)

    def _record(self, rows: SampleRows) -> SlideRecord:
        return self._stores[rows.store].records[rows.slide]

    def _is_there(self, rows: SampleRows) -> bool:
        """Whether the features of exactly these patches are there."""
        path = feature_path(self._folder, self._record(rows).id)
        if not path.exists():
            return False
        try:
            header = read_header(path)
        except DamagedStore as error:
            message(f"{error}")
            return False
        if not is_ours(header):
            raise UsageError(f"{path} was made by another tool", todo="choose another --out")
        if int(header.facts["patches_crc"]) != patches_crc(self._stores[rows.store], rows.slide):
            message(f"{path}: the store holds other patches of this slide now; made again")
            path.unlink()  # it would pass for theirs
            return False
        return self._on_error == "skip" or not header.facts["skipped"]

    def _embed(
        self,
        slide: _Slide,
        results: Iterator[tuple[NDArray[np.float32], NDArray[np.integer]]],
        count: _Count,
    ) -> None:
        """A slide's features into its file.

        Raises:
            DamagedStore: a patch is damaged, and is not to be skipped.
        """
        path = feature_path(self._folder, slide.record.id)
        rows, skipped = len(slide.batches.table), slide.batches.skipped
        with writing(path, rows, self._encoder.dimension, self._precision) as writer:
            for features, corners in results:
                writer.append(features, corners)
            store = self._stores[slide.rows.store]
            facts = slide_facts(store, slide.rows.slide) | {
                "encoder": self._encoder.facts["encoder"],
                "skipped": len(skipped),
            }
            writer.finish(facts, coords_facts(slide.record, store))
        count.patches += rows - len(skipped)
        count.skipped += len(skipped)
