"""The configuration of a training on patches or on bags, created from flags, keyword arguments and TOML files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from histopipe.annotations.rules import PixelOptions
from histopipe.errors import UsageError
from histopipe.features import BagOf
from histopipe.runs.config import (
    DATA,
    MACHINE,
    MODEL,
    OPTIMIZATION,
    SAMPLING,
    SPLITS,
    Conflict,
    TrainConfig,
)
from histopipe.runs.defaults import DEFAULTS, NEW, SMALL_CNN, parse_trainable
from histopipe.system.settings import (
    NETWORK_PATH,
    WEIGHTS_PATH,
    check_known,
    config_value,
    declared_settings,
    flag,
    read_settings,
    setting,
)
from histopipe.tasks.choices import AUGMENTATIONS, Augmentation, LabelsFrom, StainNorm, chosen_loss

if TYPE_CHECKING:
    from histopipe.splits.labelling import Labelling

BagPooling = Literal["gated", "attention", "mean", "max", "clam", "dsmil", "transformer", "none"]
BagTrainable = Literal["all", "pooling", "head"]
_COX_BATCH = 32
_EPOCHS: dict[str, Any] = {"help": "Maximum number of epochs.", "at_least": 1, "resume": True}
_FOLDERS: dict[str, Any] = {"format": "path", "search": False, "per_worker": True}
_RATE: dict[str, Any] = {"help": "Learning rate.", "above": 0}


def _setting_by_training(unit: str, name: str, **options: Any) -> Any:
    """Declare a setting whose default depends on what is trained. `--help` lists both defaults."""
    values = {trained: defaults[name] for trained, defaults in DEFAULTS[unit].items()}
    lower = [trained for trained in values if values[trained] != values[NEW]]
    if lower:
        options["default_text"] = (
            f"auto: {values[lower[0]]:g} from trained weights with --trainable {' or '.join(lower)}, "
            f"else {values[NEW]:g}"
        )
    return setting(values[NEW], group=OPTIMIZATION, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchTrainConfig(PixelOptions, TrainConfig):
    """Settings of a training on patches."""

    unit = "patches"
    on_bags = False
    stores: tuple[str, ...] = setting(
        ("patches.lmdb",),
        "Stores of patches.",
        group=DATA,
        **_FOLDERS,
    )
    labels_from: LabelsFrom = setting(
        "slide",
        "Source of patch labels: the slide, or its annotations (histopipe annotate).",
        group=DATA,
    )
    masks: str | None = setting(
        None,
        "With --task segmentation: folder of annotations SLIDE.geojson, SLIDE.xml, …, or of label images (--mask-values).",
        group=DATA,
        resume=True,
        **_FOLDERS,
    )
    min_tissue: float = setting(
        0.0,
        "Leave out patches with a smaller share of tissue.",
        group=DATA,
        at_least=0,
        at_most=1,
        format="share",
    )
    min_focus: float = setting(
        0.0, "Leave out patches with lower focus (histopipe quality).", group=DATA, at_least=0
    )
    exclude_pen: float = setting(
        1.0,
        "Leave out patches with a larger share of pen marks.",
        group=DATA,
        at_least=0,
        at_most=1,
        format="share",
    )
    exclude_dark: float = setting(
        1.0,
        "Leave out patches with a larger share of folds or black.",
        group=DATA,
        at_least=0,
        at_most=1,
        format="share",
    )
    patches_per_slide: int = setting(
        0,
        "Use at most this many random patches of each slide, the same in all epochs and for all seeds; 0: all.",
        group=DATA,
        at_least=0,
        search=False,
    )
    region_um: float = setting(
        250.0,
        "Side of the squares of --split-by region, in µm.",
        group=SPLITS,
        above=0,
        search=False,
    )
    model: str = setting(
        "small-cnn",
        "efficientnet-lite0, -lite1 or -lite2, small-cnn, a keras.applications name (resnet50), an encoder (`histopipe "
        "encoders`), a .keras file, or module.py:function.",
        group=MODEL,
        path=NETWORK_PATH,
        default_text="auto: efficientnet-lite0; small-cnn for patches below 64 pixels",
    )
    weights: str = setting(
        "auto",
        "Initial weights: none, imagenet, or a weights file or folder of the backbone; with --mil a run's folder, or a file "
        "of gated attention (FEATHER, CLAM, CHIEF).",
        group=MODEL,
        path=WEIGHTS_PATH,
        per_worker=True,
        default_text="auto: imagenet for efficientnet-lite, else none",
    )
    trainable: str = setting(
        "all",
        "Trained weights: all, head (the last layer), last:N (and the last N blocks), or lora:R (low-rank updates of "
        "rank R); with --mil all, pooling (and the last layer) or head.",
        group=MODEL,
    )
    features: str | None = setting(
        None,
        "Train the last layer on these features of the patches, instead of a network on their pixels.",
        group=MODEL,
        **_FOLDERS,
    )
    epochs: int = _setting_by_training("patches", "epochs", **_EPOCHS)
    learning_rate: float = _setting_by_training("patches", "learning_rate", **_RATE)
    head_copies: int = setting(
        0,
        "With --trainable head: compute the features of the frozen network once, of the training patches and of N - 1 "
        "augmented copies, and train on them; 0: compute the network in each step.",
        group=MODEL,
        at_least=0,
        default_text="auto: 4; 0 with --max-per-slide",
    )
    layer_decay: float = setting(
        1.0,
        "Factor of the learning rate from each block to the one before it, such as 0.75.",
        group=OPTIMIZATION,
        above=0,
        at_most=1,
    )
    allow_mismatch: bool = setting(
        False,
        "Train even if the patches have another size or scale than the encoder was trained on.",
        group=MODEL,
        search=False,
    )
    augment: tuple[Literal["none", Augmentation], ...] = setting(
        ("flips",),
        "Augmentation: none, or a list of flips (and rotations), crop, stain, colour.",
        group=SAMPLING,
    )
    stain_norm: StainNorm = setting(
        "none", "Stain normalization (run `histopipe stains` first).", group=SAMPLING
    )
    shuffle_block: int = setting(
        0,
        "Shuffle blocks of this many neighbours, for slow disks; 0 shuffles all patches.",
        group=SAMPLING,
        at_least=0,
    )
    xla: bool = setting(
        False, "Compile the network with XLA; the first step is slow.", group=MACHINE
    )
    skip_bias_gradients: bool = setting(
        False,
        "Compute no gradients of biases before batch normalization: they are zero.",
        group=MACHINE,
        search=False,
    )

    def _conflicts(self) -> list[Conflict]:
        parse_trainable(self.trainable)
        of_masks, segments = self.changed_options(), self.task == "segmentation"
        has_none = "none" in self.augment and len(self.augment) > 1
        return [
            # With slots, `super()` without arguments finds another class.
            *super(PatchTrainConfig, self)._conflicts(),
            (
                not self.task_type.of_patches,
                UsageError(f"--task {self.task}", found="patches", expected="--mil with features"),
            ),
            (
                self.masks is None and (segments or of_masks),
                UsageError(
                    flag(of_masks[0]) if of_masks else "--task segmentation",
                    found="no --masks",
                    expected="--masks with a folder of annotations, and --task segmentation",
                ),
            ),
            (
                self.masks is not None and not segments,
                UsageError("--masks", found=f"--task {self.task}", expected="--task segmentation"),
            ),
            (
                segments and (self.features or self.head_copies or self.time_budget),
                UsageError(
                    "--task segmentation",
                    found="--features, --head-copies or --time-budget",
                    expected="none of these: it trains on maps of features, which are computed in each step",
                ),
            ),
            (
                not self.task_type.by_class and self.labels_from == "annotation",
                UsageError(
                    "--labels-from annotation",
                    found=f"--task {self.task}",
                    expected="--task classification",
                ),
            ),
            (
                has_none or len(set(self.augment)) < len(self.augment),
                UsageError(
                    "--augment",
                    found=",".join(self.augment),
                    expected="none, or a list without duplicates",
                ),
            ),
            (
                self.head_copies and (self.trainable != "head" or self.max_per_slide),
                UsageError(
                    "--features" if self.features else f"--head-copies {self.head_copies}",
                    found=f"--trainable {self.trainable}, --max-per-slide {self.max_per_slide}",
                    expected="--trainable head, and no --max-per-slide, which draws other patches in each epoch",
                ),
            ),
            (
                self.features
                and self.model not in (SMALL_CNN, "features"),  # the default, before it is chosen
                UsageError(f"--model {self.model}", found="--features", expected="one of both"),
            ),
            (
                self.balance != "none" and self.shuffle_block,
                UsageError(
                    f"--balance {self.balance} draws from all slides, but --shuffle-block reads neighbouring patches",
                    todo="use one of them",
                ),
            ),
        ]

    @property
    def used_weights(self) -> str:
        """The initial weights, if `weights` is auto those of the model's default."""
        lite = self.model.startswith("efficientnet-lite")
        return self.weights if self.weights != "auto" else "imagenet" if lite else "none"

    @property
    def labelling(self) -> Labelling:
        """Patch filter and source of the labels, without the labels file."""
        # Imported late: `--help` does not need NumPy.
        from histopipe.splits.labelling import Labelling, PatchFilter

        return Labelling(
            labels_from="annotation" if self.task == "segmentation" else self.labels_from,
            patches_per_slide=self.patches_per_slide,
            patch_filter=PatchFilter(
                min_tissue=self.min_tissue,
                min_focus=self.min_focus,
                exclude_pen=self.exclude_pen,
                exclude_dark=self.exclude_dark,
            ),
        )

    @property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """The augmentations, in the order in which they are applied."""
        return tuple(name for name in AUGMENTATIONS if name in self.augment)


@dataclass(frozen=True, slots=True, kw_only=True)
class BagTrainConfig(TrainConfig):
    """Settings of a training on bags of features (multiple-instance learning)."""

    unit = "bags"
    on_bags = True
    mil: tuple[str, ...] = setting(
        MISSING,
        "Train a slide model on bags of the features in this folder. Repeat it to join feature sets by position.",
        group=DATA,
        **_FOLDERS,
    )
    bag: BagOf = setting(
        "slide", "With --mil: one bag per slide or per patient.", group=DATA, search=False
    )
    pooling: BagPooling = setting(
        "gated",
        "With --mil: pooling of a bag's patches; gated and attention are ABMIL, transformer is like TransMIL; none: a linear "
        "model of the vectors of a slide encoder.",
        group=MODEL,
    )
    weights: str = setting(
        "none",
        "With --mil: a run's folder, or a file of gated attention (FEATHER, CLAM, CHIEF).",
        group=MODEL,
        path=WEIGHTS_PATH,
        per_worker=True,
    )
    trainable: BagTrainable = setting(
        "all",
        "With --mil: all, pooling (and the last layer), or head (the last layer).",
        group=MODEL,
    )
    allow_mismatch: bool = setting(
        False,
        "Train even if the weights are for features of another encoder.",
        group=MODEL,
        search=False,
    )
    feature_scaling: Literal["standard", "none"] = setting(
        "standard",
        "With --mil: standardise features in the model by statistics of the training bags.",
        group=MODEL,
        default_text="standard; none with --weights, whose scaling is kept",
    )
    covariates: tuple[str, ...] = setting(
        (),
        "With --mil: further columns of --labels as inputs of the model, such as age,stage.",
        group=DATA,
    )
    areas: tuple[str, ...] = setting(
        (),
        "With --mil: segmentations, or stores with amounts of stains, whose columns (share_CLASS, dab) can be --covariates.",
        group=DATA,
        **_FOLDERS,
    )
    epochs: int = _setting_by_training("bags", "epochs", **_EPOCHS)
    batch_size: int = setting(
        4,
        "Bags per step, over all devices.",
        group=OPTIMIZATION,
        at_least=1,
        default_text="4; 32 for the Cox loss",
    )
    optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = setting(
        "adamw", "Optimizer.", group=OPTIMIZATION
    )
    learning_rate: float = _setting_by_training("bags", "learning_rate", **_RATE)
    weight_decay: float = setting(
        1.0,
        "Weight decay of --optimizer adamw, except that of the last layer.",
        group=OPTIMIZATION,
        at_least=0,
    )

    def _conflicts(self) -> list[Conflict]:
        common = set(self.covariates) & {*self.target_columns, "slide", "patient", "site"}
        return [
            *super(BagTrainConfig, self)._conflicts(),  # as above
            (not self.mil, UsageError("--mil", found="no folder", expected="a folder of features")),
            (
                self.used_loss == "cox" and self.batch_size < 2,
                UsageError(
                    "--batch-size",
                    found=self.batch_size,
                    expected="2 or more: the Cox loss compares the bags of a batch",
                    todo="use 16 or more",
                ),
            ),
            (
                self.pooling == "clam" and not self.task_type.of_classes,
                UsageError(
                    "--pooling clam",
                    found=f"--task {self.task}",
                    expected="classes",
                    todo="use --pooling gated, the same model without a loss of single patches",
                ),
            ),
            (
                self.trainable != "all" and self.weights == "none",
                UsageError(
                    f"--trainable {self.trainable}",
                    found="no --weights",
                    expected="the weights of a run or of a file: the rest of the model stays unchanged",
                ),
            ),
            (
                self.weights != "none"
                and (self.pooling == "none" or self.feature_scaling != "none"),
                UsageError(
                    "--weights",
                    found=f"--pooling {self.pooling}, --feature-scaling {self.feature_scaling}",
                    expected="a pooling with weights, and --feature-scaling none: the scaling of the weights is kept",
                ),
            ),
            (
                common or len(set(self.covariates)) < len(self.covariates),
                UsageError(
                    "--covariates",
                    found=", ".join(self.covariates),
                    expected="different columns that are not predicted",
                ),
            ),
            (
                self.covariates and self.labels is None and self.splits is None,
                UsageError(
                    "--covariates", found="no --labels", expected="a file with these columns"
                ),
            ),
            (
                self.split_by in ("region", "patch"),
                UsageError(
                    f"--split-by {self.split_by} divides slides, and --mil trains on whole slides",
                    todo="split by patient, site or slide",
                ),
            ),
        ]


CONFIGS: tuple[type[TrainConfig], ...] = (PatchTrainConfig, BagTrainConfig)
"""The configuration class of each kind of training."""
FORMER: Mapping[str, Any] = {"na": (), "feature_scaling": "none", "monitor": "metric"}
"""Values in runs of versions that did not record them; these versions took NA for a class."""


def make_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Create a configuration: for bags if `mil` is set, else for patches. Lists become tuples, and paths become texts.

    Raises:
        UsageError: a setting is unknown, belongs to the other kind of training, or has an invalid value.
    """
    check_known(settings, declared_settings(*CONFIGS))
    values = plain_values(settings)
    on_bags = values.get("mil") is not None
    kind, other = CONFIGS[::-1] if on_bags else CONFIGS
    if on_bags and chosen_loss(values.get("task", ""), values.get("loss", "auto")) == "cox":
        values.setdefault("batch_size", _COX_BATCH)
    if on_bags and values.get("weights", "none") != "none":
        values.setdefault("feature_scaling", "none")
    declared, foreign = declared_settings(kind), declared_settings(other)
    for name in values.keys() - declared.keys():
        # A setting of the other kind is accepted if it is switched off.
        if values[name] not in (foreign[name].default, None, "none", ("none",)):
            raise UsageError(
                "STORES" if name == "stores" else flag(name),
                found=f"--mil {' '.join(values['mil'])}" if on_bags else "no --mil",
                expected="patches" if on_bags else "--mil with a folder of features",
                todo="leave it out",
            )
    return kind(**{name: value for name, value in values.items() if name in declared})


def changed_config(config: TrainConfig, **changes: Any) -> TrainConfig:
    """Return a configuration with other values of some settings. Raises as `make_config`."""
    return make_config({**config.values(), **changes})


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings in a TOML file.

    Raises:
        UsageError: the file cannot be read, has an unknown setting, or a value of another type.
    """
    return read_settings(path, *CONFIGS)


def load_config(path: Path) -> TrainConfig:
    """Read the configuration of a training, such as a run's config.toml.

    Raises:
        UsageError: the file cannot be read, or as `make_config`.
    """
    return make_config({**FORMER, **read_config(path)})


def plain_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in the form of a configuration. One path is accepted for a list of paths."""
    declared, values = declared_settings(*CONFIGS), {}
    for name, value in settings.items():
        plain = config_value(value)
        one = isinstance(plain, str) and name in declared and declared[name].is_path_list
        values[name] = (plain,) if one else plain
    return values
