"""The features of slides to be predicted by a slide model: given, or computed with the encoder of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from histopipe.errors import NothingToDo, UsageError
from histopipe.features.feature_file import (
    read_encoder,
    record_encoder,
)
from histopipe.inference.embed import FeatureFolder, embed_stores, record_slides
from histopipe.inference.encoder import (
    COMPARED,
    check_encoder,
    check_patches,
    load_encoder,
    recorded_options,
    trained_patches,
)
from histopipe.inference.options import BATCHES, PredictOptions
from histopipe.inference.slide_run import (
    Network,
    SlideRun,
    batch_rule,
)
from histopipe.inference.slide_tiler import FileSource
from histopipe.inference.stored_slides import PatchRequirements, check_store
from histopipe.predictions.sources import PredictionsFolder
from histopipe.store.store import Store
from histopipe.system.folders import ENCODER
from histopipe.system.output import Progress
from histopipe.system.settings import PathLike

if TYPE_CHECKING:
    from histopipe.inference.networks import TrainedBags


SourceKind = Literal["stores", "features", "slides"]


FEATURES = "features"
"""Folder of the features that were computed for the predictions; features-1, features-2 for several sets."""


@dataclass(slots=True)
class BagFeatures:
    """The features of `paths` for the model `first`. Computed ones are kept in the folder of `predictions`.

    The options `encoder` and `encoder_weights` replace the recorded places of the encoders: one for each feature set, or
    one for all.
    """

    first: TrainedBags
    predictions: PredictionsFolder
    paths: Sequence[Path]
    kind: SourceKind
    options: PredictOptions
    progress: Progress
    urls: Sequence[str] = ()
    """Slides at URLs, in addition to the slide files in `paths`."""
    runs: list[SlideRun] = field(default_factory=list)
    """Runs of slides through the encoders."""

    def folders(self, begin: Callable[[], None]) -> Sequence[Path]:
        """Return a folder of features per feature set, after computing what is missing in it.

        `begin` is called before anything is computed, when the input has been checked.

        Raises:
            UsageError: these are not the features, or the patches, of the training.
        """
        return self._checked() if self.kind == "features" else self._computed(begin)

    def _checked(self) -> Sequence[Path]:
        """Check that folders hold the features of the training."""
        encoders = self.first.encoders
        if len(self.paths) != len(encoders):
            raise UsageError(
                "folders of features",
                found=len(self.paths),
                expected=f"{len(encoders)}, in the order of --mil: {', '.join(self.first.config.mil)}",
            )
        for path, expected in zip(self.paths, encoders, strict=True):
            record = read_encoder(path)
            if record is not None and expected is not None:
                check_encoder(record, expected, str(path))
            else:
                self.progress.message(
                    f"warning: {path if record is None else 'the training'} does not record the encoder: "
                    "only the number of features is compared"
                )
        return self.paths

    def _computed(self, begin: Callable[[], None]) -> Sequence[Path]:
        """Compute the features of stores or slide files. Return their folders."""
        records = self.first.encoders
        encoders = [record for record in records if record is not None]
        if len(encoders) < len(records):
            raise UsageError(
                f"the encoder of {self.first.config.mil[records.index(None)]} is not recorded",
                found=self.kind,
                expected="folders of features of the same encoder",
            )
        trained = [trained_patches(record, self.first.run.folder) for record in encoders]
        with ExitStack() as stack:
            stores: list[Store] = []
            if self.kind == "stores":
                self.options.check_for_stores()
                stores = [stack.enter_context(Store(path)) for path in self.paths]
                _check_stores(stores, trained)
            folders = []
            for number, (record, patches) in enumerate(zip(encoders, trained, strict=True)):
                encoder = self._encoder(number, record, patches)
                if number == 0:
                    begin()
                suffix = "" if len(encoders) == 1 else f"-{number + 1}"
                target = self.predictions.path / f"{FEATURES}{suffix}"
                target.mkdir(exist_ok=True)
                record_encoder(target, {**record, **encoder.identity, "batches": BATCHES})
                dtype = record.get("dtype", "float32")
                features = FeatureFolder(encoder, target, dtype, self.predictions)
                self.runs.append(
                    embed_stores(
                        [store for store in stores if patches.fit(store)],
                        features,
                        on_error=self.options.on_error,
                        stain_norm=patches.stain_norm,
                        batch_size=self.options.batch_size,
                        progress=self.progress,
                    )
                    if stores
                    else self._embed_files(features, patches)
                )
                folders.append(target)
        return folders

    def _encoder(
        self, number: int, record: Mapping[str, Any], required: PatchRequirements
    ) -> Network:
        """Load an encoder, and check that it is that of the training."""
        places = {
            "model": ("--encoder", self.options.encoder),
            "weights": ("--encoder-weights", self.options.encoder_weights),
        }
        moved = {
            name: _one_of(flag, values, number) for name, (flag, values) in places.items() if values
        }
        options = recorded_options(
            record, **moved, devices=self.options.devices, batch_size=self.options.batch_size
        )
        check_patches(options, required.patch_size, [required.patch_mpp])
        encoder = load_encoder(options, required.patch_size)
        identity = {name: encoder.identity.get(name) for name in COMPARED}
        check_encoder({**record, **identity}, record, f"--encoder {options.model}")
        return encoder

    def _embed_files(self, features: FeatureFolder, required: PatchRequirements) -> SlideRun:
        # The bags have the labels.
        options = replace(
            self.options, labels=None, subgroup=(), batch_rule=batch_rule(features.path / ENCODER)
        )
        with FileSource([*self.paths, *self.urls], required, options, self.progress) as source:
            run = SlideRun(features.encoder, "embedding", source.count, self.progress)
            run.run(source.slides(run, features.complete), features.write, stop=source.close)
            record_slides(features.path, source.slide_table(()), run.failed)
        return run


def _check_stores(stores: Sequence[Store], trained: Sequence[PatchRequirements]) -> None:
    """Check that every store has the patches of a feature set, and every set a store."""
    for store in stores:
        if len(trained) == 1:
            check_store(store, trained[0])
        elif not any(patches.fit(store) for patches in trained):
            raise UsageError(
                f"{store.path}: its patches are not those of a feature set of the training",
                found=f"{store.patch_size} pixels, mpp {store.spec.get('mpp')}",
                expected=" or ".join(
                    f"{patches.patch_size} pixels, mpp {(patches.spec or {}).get('mpp')}"
                    for patches in trained
                ),
            )
    for number, patches in enumerate(trained, 1):
        if not any(patches.fit(store) for store in stores):
            raise NothingToDo(
                f"no store has the patches of feature set {number} of the training",
                expected=f"{patches.patch_size} pixels, mpp {(patches.spec or {}).get('mpp')}",
                todo="name the stores of all feature sets",
            )


def _one_of(flag: str, values: Sequence[PathLike], number: int) -> str:
    """Return the value of a feature set: one value applies to all sets."""
    if 1 < len(values) <= number:
        raise UsageError(flag, found=f"{len(values)} times", expected="once per feature set")
    return str(values[0] if len(values) == 1 else values[number])
