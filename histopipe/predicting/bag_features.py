"""The features that slide models predict: given ones, or those of stores and slide files, computed as in the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histopipe.errors import UsageError
from histopipe.features.feature_file import feature_files, feature_path
from histopipe.features.feature_sets import COMPARED, check_encoder, record_encoder
from histopipe.inference.embed import embed_files, embed_stores
from histopipe.inference.encoder import check_patches, load_encoder, recorded_options
from histopipe.inference.feature_folders import FeatureFolder, FeatureFolders
from histopipe.inference.options import BATCHES, PredictOptions
from histopipe.inference.slide_run import Network, SlideRun, batch_rule
from histopipe.inference.slide_tiler import source_of_files
from histopipe.inference.slide_vectors import OF_PATCHES, SlideVectors, takes_vectors
from histopipe.inference.stored_slides import (
    PatchRequirements,
    SourceKind,
    check_stores,
    trained_patches,
)
from histopipe.predictions.sources import PredictionsFolder
from histopipe.runs.run import Run
from histopipe.store.store import Store
from histopipe.system.files import read_record
from histopipe.system.folders import ENCODER
from histopipe.system.output import Progress
from histopipe.system.settings import PathLike

if TYPE_CHECKING:
    from histopipe.inference.networks import TrainedBags

FEATURES = "features"
"""Folder of the features that were computed for the predictions; features-1, features-2 for several sets."""


@dataclass(slots=True)
class BagFeatures:
    """The features in `sources`, or of stores and slide files, which are computed in the folder `target`.

    Attributes:
        model: a model that takes them.
        runs: runs of slides through the encoders.
        failed: reasons by slide.
        vectors: those of the features, if these are of patches and the model takes vectors of slides.
    """

    model: TrainedBags
    target: PredictionsFolder
    sources: Sequence[Path | str]
    kind: SourceKind
    options: PredictOptions
    progress: Progress
    runs: list[SlideRun] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    vectors: SlideVectors | None = None

    def folders(self, record_settings: Callable[[], None]) -> Sequence[Path]:
        """Return a folder per feature set. `record_settings` is called after all checks, before the first file is written.

        Raises:
            UsageError: the features, or their encoders, are not those of the training.
        """
        find = self._given if self.kind == "features" else self._computed
        return find(record_settings)

    def _given(self, record_settings: Callable[[], None]) -> Sequence[Path]:
        """Return the folders of features, after a check that these are those of the training."""
        encoders, folders = self.model.encoders, list(map(Path, self.sources))
        if len(folders) != len(encoders):
            raise UsageError(
                "folders of features",
                found=len(folders),
                expected=f"{len(encoders)}, in the order of --mil: {', '.join(self.model.config.mil)}",
            )
        for number, (path, expected) in enumerate(zip(folders, encoders, strict=True)):
            record = read_record(path / ENCODER)  # None in folders of other tools
            if expected is not None and takes_vectors(expected) and not takes_vectors(record):
                folders[number] = self._vectors_of(path, number, expected, record_settings)
                continue
            check_same_encoder(path, expected, self.progress)
        return folders

    def _vectors_of(
        self,
        path: Path,
        number: int,
        expected: Mapping[str, Any],
        record_settings: Callable[[], None],
    ) -> Path:
        """Compute the vectors of the slide encoder of the training from features of patches."""
        moved = _moved(self.options, number)
        options = recorded_options(expected, **moved, devices=self.options.devices)
        self.vectors = SlideVectors(path, options)
        check_encoder(self.vectors.record, expected, str(path))
        if expected[OF_PATCHES] and self.vectors.record[OF_PATCHES]:
            check_encoder(self.vectors.record[OF_PATCHES], expected[OF_PATCHES], str(path))
        record_settings()  # after all checks, and before the first file is written
        target = self.target.folder / FEATURES
        self.failed |= self.vectors.write(target, self.progress)["failed"]
        for name in feature_files(target).keys() - self.vectors.bags.keys():
            feature_path(target, name).unlink()  # of an earlier command
        return target

    def _computed(self, record_settings: Callable[[], None]) -> Sequence[Path]:
        """Compute the missing features of stores or slide files. Return a folder per feature set."""
        records = self.model.encoders
        encoders = [record for record in records if record is not None]
        if len(encoders) < len(records):
            raise UsageError(
                f"the encoder of {self.model.config.mil[records.index(None)]} is not recorded",
                found=self.kind,
                expected="folders of features of the same encoder",
            )
        self._refuse_vectors(encoders)
        trained = [trained_patches(record, self.model.run.folder) for record in encoders]
        with ExitStack() as stack:
            stores: list[Store] = []
            if self.kind == "stores":
                self.options.check_for_stores()
                stores = [stack.enter_context(Store(path)) for path in self.sources]
                check_stores(stores, trained)
            folders = []
            for number, (record, patches) in enumerate(zip(encoders, trained, strict=True)):
                encoder = recorded_encoder(record, patches, self.options, number)
                if number == 0:  # the input has been checked, and nothing is computed yet
                    record_settings()
                name = FEATURES if len(encoders) == 1 else f"{FEATURES}-{number + 1}"
                target = self.target.folder / name
                target.mkdir(exist_ok=True)
                record_encoder(
                    target,
                    {**record, **encoder.identity, "batches": BATCHES},
                    self.options.share,
                )
                dtype = record.get("dtype", "float32")
                features = FeatureFolders(
                    [FeatureFolder(encoder, target, dtype, self.target)],
                    encoder,
                    self.options.share,
                )
                self.runs.append(
                    embed_stores(
                        [store for store in stores if patches.fit(store)],
                        features,
                        on_error=self.options.on_error,
                        stain_norm=patches.stain_norm,
                        progress=self.progress,
                    )
                    if stores
                    else self._embed_files(features, patches)
                )
                self.failed |= self.runs[-1].failed
                folders.append(target)
        return folders

    def _refuse_vectors(self, encoders: Sequence[Mapping[str, Any]]) -> None:
        """Raise a UsageError if the model takes vectors, which need features of patches first."""
        if any(map(takes_vectors, encoders)):
            raise UsageError(
                f"{self.model.run.folder}, a run on vectors of a slide encoder",
                found=self.kind,
                expected="a folder of features of patches, or of vectors",
                todo="run `histopipe embed` with the encoder of the patches first",
            )

    def _embed_files(self, features: FeatureFolders, required: PatchRequirements) -> SlideRun:
        # The bags have the labels.
        options = replace(self.options, labels=None, subgroup=())
        rule = batch_rule(features.folders[0].path / ENCODER)
        with source_of_files(self.sources, required, options, self.progress, rule) as source:
            return embed_files(source, features, self.progress)


def check_same_encoder(
    folder: Path, expected: Mapping[str, Any] | None, progress: Progress
) -> None:
    """Check that features are of the encoder of a training.

    Raises:
        UsageError: they are not.
    """
    record = read_record(folder / ENCODER)  # None in folders of other tools
    if record is not None and expected is not None:
        check_encoder(record, expected, str(folder))
    else:
        progress.message(
            f"warning: {folder if record is None else 'the training'} does not record the encoder: "
            "only the number of features is compared"
        )


def recorded_encoder(
    record: Mapping[str, Any], required: PatchRequirements, options: PredictOptions, number: int = 0
) -> Network:
    """Load the encoder of a feature set of a training, and check that it is this one.

    Raises:
        UsageError: it is not, or it is not there.
    """
    choice = recorded_options(
        record,
        **_moved(options, number),
        devices=options.devices,
        batch_size=options.batch_size,
    )
    check_patches(choice, required.patch_size, [required.patch_mpp])
    encoder = load_encoder(choice, required.patch_size)
    check_encoder(
        {**record, **{name: encoder.identity.get(name) for name in COMPARED}},
        record,
        f"--encoder {choice.encoder}",
    )
    return encoder


def patch_encoder(run: Run, options: PredictOptions) -> tuple[PatchRequirements, Network]:
    """Return the patches and the encoder of a run on features of patches. Raises as `recorded_encoder`."""
    (record,) = run.metrics_file["encoders"]
    if record is None:
        raise UsageError(
            f"the encoder of the features of {run.folder} is not recorded",
            expected="a folder of features of the same encoder",
        )
    patches = trained_patches(record, run.folder)
    return patches, recorded_encoder(record, patches, options)


def _moved(options: PredictOptions, number: int) -> dict[str, str]:
    """Return the given places of an encoder."""
    places = {
        "model": ("--encoder", options.encoder),
        "weights": ("--encoder-weights", options.encoder_weights),
    }
    return {
        name: _one_of(flag, values, number) for name, (flag, values) in places.items() if values
    }


def _one_of(flag: str, values: Sequence[PathLike], number: int) -> str:
    """Return the value of a feature set: one value applies to all sets."""
    if 1 < len(values) <= number:
        raise UsageError(flag, found=f"{len(values)} times", expected="once per feature set")
    return str(values[number % len(values)])
