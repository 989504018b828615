"""Options of `predict` and `embed`. The module imports nothing slow, since `--help` lists them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from histopipe.errors import OnError, UsageError
from histopipe.features import BagOf, StoredType
from histopipe.slides.slide_formats import LABELS, SLIDE_FILES, PatchReadingOptions
from histopipe.system.parts import PartOptions
from histopipe.system.settings import (
    NETWORK_PATH,
    WEIGHTS_PATH,
    PathLike,
    declared_settings,
    setting,
)
from histopipe.tasks.choices import Aggregation, StainNorm
from histopipe.tiling.spec import AskedFinder

BATCHES = "remainder-1"
"""Rule of `slide_batches`, recorded in a folder of results: its later slides follow the rule of its first."""
NETWORK, SLIDE_MODELS, SLIDE_ENCODERS = "Network", "Slide models", "Slide encoders"
MAPS = "Maps of pixels"


@dataclass(frozen=True, init=False, repr=False, eq=False, kw_only=True)
class NetworkOptions(PartOptions):
    """Options of commands that apply a network to patches."""

    devices: str = setting("auto", "Devices: auto, cpu, cpu:N, gpu or gpu:0,1.", group=NETWORK)
    on_error: OnError = setting(
        "raise",
        "Damaged patch in a store: fail its slide (raise), or leave the patch out (skip).",
        group=NETWORK,
    )


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(NetworkOptions):
    """Options of `embed`."""

    model: Sequence[PathLike] = setting(
        (),
        "Encoder: a name of `histopipe encoders`, of a slide encoder for a folder of features, a run's folder, a keras.applications name, an ONNX or .keras "
        "file, a SavedModel folder, or module.py:function. Repeat it for several encoders in one pass.",
        group=NETWORK,
        format="repeated",
        path=NETWORK_PATH,
        default_text="efficientnet-lite0, for patches of 64 pixels or more",
    )
    weights: Sequence[PathLike] = setting(
        (),
        "Weights of a named encoder: a file or folder; else imagenet (default) or none. With several encoders, "
        "NAME=FILE.",
        group=NETWORK,
        format="repeated",
        path=WEIGHTS_PATH,
    )
    allow_mismatch: bool = setting(
        False,
        "Embed even if the patches have another size or scale than the encoder was trained on.",
        group=NETWORK,
    )
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = setting(
        "float32", "Precision of the network.", group=NETWORK
    )
    xla: bool = setting(
        False, "Compile the network with XLA; the first batch is slow.", group=NETWORK
    )
    dtype: StoredType = setting(
        "float32", "Type of the stored features; float16 needs half the space.", group=NETWORK
    )
    batch_size: int | Literal["auto"] = setting(
        64,
        "Patches per batch, over all devices; auto: the fastest that fits into memory.",
        group=NETWORK,
        at_least=1,
    )
    stain_norm: StainNorm | None = setting(
        None, "Stain normalization.", group=NETWORK, default_text="method of the run, else none"
    )

    bag: BagOf = setting(
        "slide", "With a slide encoder: one vector per slide, or per patient.", group=SLIDE_ENCODERS
    )
    attention: bool = setting(
        False,
        "With a slide encoder: also write the attention of each patch, for `histopipe heatmap`.",
        group=SLIDE_ENCODERS,
    )

    @property
    def encoder(self) -> str:
        """The encoder, if there is one."""
        return str(self.model[0]) if self.model else ""

    def of_encoders(self) -> list[EmbedOptions]:
        """Return the options of each encoder.

        Raises:
            UsageError: weights are not those of one encoder, or two encoders have one name.
        """
        if len(self.model) < 2 and len(self.weights) < 2:
            return [self]
        pairs = [str(weights).partition("=") for weights in self.weights]
        named, names = {name: file for name, _, file in pairs}, [*map(str, self.model)]
        if len(set(map(encoder_name, names))) < len(names):
            raise UsageError("--model", found=", ".join(names), expected="different names")
        if not all(file and name in names for name, _, file in pairs) or len(named) < len(pairs):
            raise UsageError(
                "--weights",
                found=", ".join(map(str, self.weights)),
                expected=f"NAME=FILE, each NAME once, of --model {' --model '.join(names)}",
            )
        return [
            replace(self, model=(name,), weights=(named[name],) if name in named else ())
            for name in names
        ]


def encoder_name(model: str) -> str:
    """Return the name of an encoder for folders: that of its file or folder without the suffix."""
    return PurePath(model).stem


@dataclass(frozen=True, kw_only=True)
class PredictOptions(PatchReadingOptions, NetworkOptions):
    """Options of `predict`. Those of slide files apply to slide files only."""

    batch_size: int = setting(64, "Patches per batch, over all devices.", group=NETWORK, at_least=1)
    aggregate: Aggregation = setting(
        "mean", "Aggregation of patches to slides and patients.", group=NETWORK
    )
    labels: PathLike | None = setting(
        None,
        "CSV file with the columns slide, label, and optionally patient; or with the targets, and for slide models "
        "covariates, of the training. Metrics are reported where labels are known.",
        group=LABELS,
        format="path",
        default_text="the store's",
    )
    calibrate_with: PathLike | None = setting(
        None,
        "CSV file with labels of predicted slides that no training has used: temperature and thresholds are fitted to them, "
        "and metrics are of the others.",
        group=LABELS,
        format="path",
    )
    subgroup: Sequence[str] = setting(
        (),
        "Columns of --labels by which metrics are reported, as for `train`.",
        group=LABELS,
        default_text="those of the training",
    )
    overlap: int | None = setting(
        None, "Overlap of patches in pixels.", group=SLIDE_FILES, default_text="as trained"
    )
    tissue: Literal[AskedFinder, "none"] | None = setting(
        None, "Tissue detection.", group=SLIDE_FILES, default_text="as trained"
    )
    tissue_threshold: float | None = setting(
        None,
        "Minimum share of tissue in a patch.",
        group=SLIDE_FILES,
        at_least=0,
        at_most=1,
        format="share",
        default_text="as trained",
    )
    map_mpp: float | None = setting(
        None,
        "Of a segmentation: µm per pixel of the maps, rounded so that a patch has a whole number of them.",
        group=MAPS,
        above=0,
        default_text="that of the patches",
    )
    tolerance_um: float = setting(
        2.0,
        "Of a segmentation: distance by which outlines may be simplified, in µm.",
        group=MAPS,
        at_least=0,
    )
    regions: int = setting(
        64,
        "With a slide encoder: regions that are left out in turn, to find what they contribute; 0: none.",
        group=SLIDE_ENCODERS,
        at_least=0,
    )
    encoder: Sequence[PathLike] = setting(
        (),
        "Encoder of the model, if it has moved; once per feature set.",
        group=SLIDE_MODELS,
        format="repeated",
        path=NETWORK_PATH,
        default_text="as recorded",
    )
    encoder_weights: Sequence[PathLike] = setting(
        (),
        "Weights of the encoder, if they have moved.",
        group=SLIDE_MODELS,
        format="repeated",
        path=WEIGHTS_PATH,
        default_text="as recorded",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = self.subgroup_columns
        if columns and self.labels is None:
            raise UsageError(
                "--subgroup",
                found=f"{', '.join(columns)}, but no --labels",
                expected="a CSV file with these columns",
            )

    @property
    def subgroup_columns(self) -> tuple[str, ...]:
        """Columns of the labels file for subgroups."""
        # Imported late: `--help` does not need NumPy.
        from histopipe.evaluation.subgroups import labels_columns

        return labels_columns(self.subgroup)

    @property
    def tiling(self) -> dict[str, Any]:
        """The tiling settings that differ from those of the training."""
        return {
            name: getattr(self, name)
            for name in ("overlap", "tissue", "tissue_threshold")
            if getattr(self, name) is not None
        }

    def check_for_stores(self) -> None:
        """Raise a UsageError if an option is given that applies to slide files only."""
        declared = declared_settings(PredictOptions)
        refuse_options(
            self,
            [name for name in declared if declared[name].group == SLIDE_FILES],
            found="a store",
            expected="slides",
            todo="remove the option: the patches of a store are already tiled",
        )


def refuse_options(options: NetworkOptions, names: Collection[str], **explained: str) -> None:
    """Raise a UsageError with this explanation if one of these options is not its default."""
    for name, declared in declared_settings(type(options)).items():
        if name in names and getattr(options, name) != declared.default:
            raise UsageError(declared.flag, **explained)
