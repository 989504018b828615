"""Settings of every training; `task_config` adds those of patches and of bags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from histopipe.errors import OnError, UsageError
from histopipe.system.settings import check_settings, declared_settings, setting
from histopipe.system.table_cells import NA_VALUES
from histopipe.system.urls import MLFLOW_PLACES, check_track
from histopipe.tasks.choices import LOSSES, Balance, Loss, SplitBy, TaskName, chosen_loss

if TYPE_CHECKING:
    from histopipe.tasks.predictions import EvaluationSettings
    from histopipe.tasks.task import Task

Conflict = tuple[object, UsageError]
"""Whether a combination of settings is not allowed, and its error."""
Precision = Literal["float32", "mixed_bfloat16", "mixed_float16", "float64"]

DATA, SPLITS, MODEL = "Data", "Splits", "Model"
OPTIMIZATION, SAMPLING = "Optimization", "Sampling and augmentation"
EVALUATION, MACHINE, RUN = "Evaluation", "Devices and memory", "Run"
_OF_WORKERS: dict[str, Any] = {"resume": True, "search": False, "per_worker": True}
"""Declaration of settings that do not change the results, and may differ between workers."""
_OF_EVALUATION: dict[str, Any] = {"group": EVALUATION, "resume": True, "search": False}
"""Declaration of settings that evaluate a finished run again."""


@dataclass(frozen=True, init=False, repr=False, eq=False, slots=True, kw_only=True)
class TrainConfig:
    """Settings of every training, on `unit`: patches, or bags. Raise a UsageError if values or combinations are invalid."""

    unit: ClassVar[str]
    on_bags: ClassVar[bool]
    labels: str | None = setting(
        None,
        "CSV file with the columns slide, label, and optionally patient and site; replaces the recorded labels.",
        group=DATA,
        format="path",
        search=False,
        per_worker=True,
    )
    na: tuple[str, ...] = setting(
        NA_VALUES,
        "Cells of --labels that are missing values, apart from the empty cell.",
        group=DATA,
        search=False,
    )
    task: TaskName = setting(
        "classification",
        "What is predicted: a class, several labels, numbers, survival, or a class for each pixel.",
        group=DATA,
        search=False,
    )
    target: tuple[str, ...] = setting(
        (),
        "Columns of --labels to predict: 0/1 columns for multilabel, numbers for regression.",
        group=DATA,
        search=False,
    )
    time: str | None = setting(
        None,
        "Column of --labels with the time until the event, or until the last visit, for survival.",
        group=DATA,
        search=False,
    )
    event: str | None = setting(
        None,
        "Column of --labels with 1 if the event happened at --time, else 0; or COLUMN=VALUE: it happened where COLUMN has VALUE.",
        group=DATA,
        search=False,
    )
    censored: str | None = setting(
        None,
        "In place of --event: column of --labels with 0 if the event happened, and 1 if it did not until --time.",
        group=DATA,
        search=False,
    )
    loss: Loss = setting(
        "auto",
        "Training loss of --task regression (huber or squared) or survival (cox or discrete); auto: the first.",
        group=OPTIMIZATION,
    )
    allow_extra_rows: bool = setting(
        False, "Ignore rows of --labels that match no slide.", group=DATA, search=False
    )
    on_error: OnError = setting(
        "raise",
        "On damaged data: end the run (raise), or skip the data with weight 0 (skip).",
        group=DATA,
        resume=True,
        search=False,
    )
    split_by: SplitBy = setting(
        "patient",
        "Keep each patient, site, slide, region or patch in one subset of the split.",
        group=SPLITS,
        search=False,
    )
    fractions: tuple[float, ...] = setting(
        (0.7, 0.15, 0.15),
        "Shares of training, validation and test; without validation, the last epoch is kept.",
        group=SPLITS,
        search=False,
    )
    split_column: str | None = setting(
        None,
        "Column of --labels with the subset of each slide (train, validation or test), or its fold for --folds column.",
        group=SPLITS,
        search=False,
    )
    splits: str | None = setting(
        None,
        "Read the split from this splits.json.",
        group=SPLITS,
        format="path",
        search=False,
        per_worker=True,
    )
    allow_leaks: bool = setting(
        False, "Train even if a patient or slide is in several subsets.", group=SPLITS, search=False
    )
    dropout: float = setting(
        0.15, "Dropout rate before the last layer.", group=MODEL, at_least=0, below=1
    )
    time_budget: float = setting(
        0.0,
        "Time for the whole command, such as 30m: left-out --trainable, --epochs and --patches-per-slide are chosen by it.",
        group=OPTIMIZATION,
        at_least=0,
        format="duration",
        search=False,
    )
    more_time: str = setting(
        "", "What more than --time-budget would change.", group=RUN, hidden=True
    )
    epochs: int  # declared by the subclasses, as the learning rate
    batch_size: int = setting(
        64, "Patches or bags per step, over all devices.", group=OPTIMIZATION, at_least=1
    )
    optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = setting(
        "adam", "Optimizer.", group=OPTIMIZATION
    )
    learning_rate: float
    weight_decay: float = setting(
        0.004, "Weight decay of --optimizer adamw.", group=OPTIMIZATION, at_least=0
    )
    schedule: Literal["constant", "cosine"] = setting(
        "constant",
        "Learning rate schedule; cosine falls to 0 at the end of --epochs.",
        group=OPTIMIZATION,
    )
    warmup_steps: int = setting(
        0, "Steps of linear warm-up before --schedule cosine.", group=OPTIMIZATION, at_least=0
    )
    clip_norm: float = setting(
        0.0, "Maximum global gradient norm; 0: no clipping.", group=OPTIMIZATION, at_least=0
    )
    label_smoothing: float = setting(
        0.0, "Label smoothing of the training loss.", group=OPTIMIZATION, at_least=0, below=1
    )
    class_weights: Literal["none", "balanced"] = setting(
        "none",
        "Class weights in the loss; balanced: inverse to class frequency among the samples of an epoch.",
        group=OPTIMIZATION,
    )
    monitor: Literal["loss", "metric"] = setting(
        "loss",
        "Validation value that chooses the epoch: the loss, or the AUC, R² or concordance index, with ties by the loss.",
        group=OPTIMIZATION,
    )
    patience: int = setting(
        5,
        "Stop after this many epochs without a better value of --monitor; 0: never stop.",
        group=OPTIMIZATION,
        at_least=0,
        resume=True,
    )
    balance: Balance = setting(
        "none", "Sampling balance: draw each class, slide or patient equally often.", group=SAMPLING
    )
    max_per_slide: int = setting(
        0,
        "Maximum number of training patches per slide, drawn again in each epoch; 0: all.",
        group=SAMPLING,
        at_least=0,
    )
    positive: str | None = setting(
        None,
        "Positive class, if there are two classes.",
        default_text="the last by name",
        **_OF_EVALUATION,
    )
    threshold: str = setting(
        "youden",
        "Decision threshold, set on validation: youden, sensitivity:0.95, specificity:0.95, or a probability.",
        **_OF_EVALUATION,
    )
    top_k: int = setting(
        10, "Number of patches in a slide's top_k score.", at_least=1, **_OF_EVALUATION
    )
    horizon: float | None = setting(
        None,
        "With --task survival: time at which predicted and observed survival are compared.",
        above=0,
        default_text="median follow-up",
        **_OF_EVALUATION,
    )
    calibrate: bool = setting(
        False,
        "Fit a temperature to the validation predictions, so that probabilities are calibrated.",
        group=EVALUATION,
        search=False,
    )
    conformal: float | None = setting(
        None,
        "Add prediction sets, which miss the truth for at most this share of patients, such as 0.1.",
        group=EVALUATION,
        above=0,
        below=1,
        search=False,
    )
    calibration_share: float = setting(
        0.2,
        "Share of the training patients that are set aside to calibrate --conformal; 0, as with --folds: the test set calibrates.",
        group=EVALUATION,
        at_least=0,
        below=1,
        search=False,
    )
    subgroup: tuple[str, ...] = setting(
        (),
        "Columns of --labels by which metrics are reported, numbers in steps: scanner,sex,age:10.",
        group=EVALUATION,
        search=False,
    )
    resamples: int = setting(
        1000,
        "Bootstrap resamples of the patients for 95 % intervals; 0: no intervals.",
        at_least=0,
        **_OF_EVALUATION,
    )
    devices: str = setting(
        "auto", "Devices: auto, cpu, cpu:N, gpu or gpu:0,1.", group=MACHINE, **_OF_WORKERS
    )
    accumulate: int = setting(
        1,
        "Compute each step in up to this many pieces, which needs less memory for the same batch.",
        group=MACHINE,
        at_least=1,
        resume=True,
    )
    precision: Precision = setting(
        "float32",
        "Precision of the network. Prefer bfloat16 to float16 if the GPU supports it.",
        group=MACHINE,
    )
    deterministic: bool = setting(
        False, "Use bitwise repeatable operations; slower.", group=MACHINE, search=False
    )
    communication: Literal["auto", "ring", "nccl"] = setting(
        "auto",
        "Communication between workers (named by TF_CONFIG or Slurm).",
        group=MACHINE,
        resume=True,
        search=False,
    )
    worker_timeout: float = setting(
        600.0, "Seconds to wait for another worker.", group=MACHINE, above=0, **_OF_WORKERS
    )
    log_device_placement: bool = setting(
        False, "Print the device of each operation.", group=MACHINE, **_OF_WORKERS
    )
    seed: int = setting(
        1,
        "Seed of split, order, weights, augmentation and dropout.",
        group=RUN,
        at_least=0,
        at_most=(1 << 32) - 1,
        search=False,
    )
    save_minutes: float = setting(
        10.0, "Checkpoint interval in minutes.", group=RUN, above=0, **_OF_WORKERS
    )
    tensorboard: bool = setting(
        False, "Write TensorBoard logs into the run's folder.", group=RUN, **_OF_WORKERS
    )
    track: str | None = setting(
        None,
        "Write settings, metrics of each epoch and files to MLflow: mlflow, or mlflow:URI of a server or a folder.",
        group=RUN,
        path=rf"mlflow:(?!({'|'.join(MLFLOW_PLACES)})$)(?P<path>[^:]*)",
        **_OF_WORKERS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        # Imported late: `--help` does not need NumPy.
        from histopipe.tasks.predictions import check_rule

        check_rule(self.threshold)
        if self.track:
            check_track(self.track)
        for is_wrong, error in self._conflicts():
            if is_wrong:
                raise error

    def _conflicts(self) -> list[Conflict]:
        """Return which combinations of settings are not allowed. The first one is reported."""
        # Imported late: `--help` does not need it.
        from histopipe.system.tensorflow import parse_devices

        match = parse_devices(self.devices)
        count = int(match["cpus"] or 1) if match["gpus"] is None else match["gpus"].count(",") + 1
        return [
            *self._conflicts_of_splits(),
            (
                self.batch_size < count,
                UsageError(
                    "--batch-size",
                    found=self.batch_size,
                    expected=f"at least one for each of the {count} devices of --devices {self.devices}",
                ),
            ),
            (
                self.warmup_steps and self.schedule == "constant",
                UsageError(
                    "--warmup-steps", found="--schedule constant", expected="--schedule cosine"
                ),
            ),
            (
                self.accumulate > self.batch_size,
                UsageError(
                    "--accumulate",
                    found=self.accumulate,
                    expected=f"at most the {self.batch_size} {self.unit} of --batch-size",
                ),
            ),
            *self._conflicts_with_task(),
            (
                self.conformal and not self._may_have_sets,
                UsageError(
                    "--conformal",
                    found=f"--task {self.task}, --split-by {self.split_by}",
                    expected="classes or numbers of slides, split by patient or site; times of survival are censored",
                ),
            ),
            (
                self.balance == "class" and self.class_weights == "balanced",
                UsageError(
                    "--balance class and --class-weights balanced both correct for class frequencies",
                    todo="use one of them",
                ),
            ),
        ]

    def _conflicts_of_splits(self) -> list[Conflict]:
        columns, fractions = self.further_columns, self.fractions
        is_split = len(fractions) == 3 and min(fractions) >= 0 and 0 < fractions[0] < 1
        return [
            (
                columns and self.labels is None,
                UsageError(
                    "--subgroup" if self.split_column is None else "--split-column",
                    found=f"{', '.join(columns)}, but no --labels",
                    expected="a CSV file with these columns",
                ),
            ),
            (
                not (is_split and abs(sum(fractions) - 1) <= 1e-6),
                UsageError(
                    "--fractions",
                    found=fractions,
                    expected="train,validation,test with a sum of 1, the first and another one above 0",
                ),
            ),
            (
                self.split_column is not None and self.split_by in ("region", "patch"),
                UsageError(
                    f"--split-column {self.split_column} has a subset for each slide",
                    found=f"--split-by {self.split_by}",
                    expected="patient, site or slide, by which a missing validation set is drawn",
                ),
            ),
        ]

    def _conflicts_with_task(self) -> list[Conflict]:
        """Return whether settings of the task are missing, or those of another task are set."""
        task, losses = f"--task {self.task}", ("auto", *LOSSES[self.task])
        needed = self.task_type.settings
        event = self.event or self.censored
        columns_of = {"target": self.target, "time": self.time, "event": event}
        conflicts: list[Conflict] = [
            *(
                (
                    bool(value) != (name in needed),
                    UsageError(
                        f"--{name}", found="no column", expected=f"a column of --labels for {task}"
                    )
                    if name in needed
                    else UsageError(f"--{name}", found=task, expected="another --task"),
                )
                for name, value in columns_of.items()
            ),
            (
                self.event and self.censored,
                UsageError("--censored", found=f"--event {self.event}", expected="one of them"),
            ),
            (
                self.horizon and "time" not in needed,
                UsageError("--horizon", found=task, expected="--task survival"),
            ),
        ]
        if self.task_type.of_classes:
            with_losses = " or ".join(name for name, losses in LOSSES.items() if losses)
            error = UsageError("--loss", found=task, expected=f"--task {with_losses}")
            return [*conflicts, (self.loss != "auto", error)]
        columns, has_values = self.target_columns, not self.task_type.probabilities
        is_numeric = has_values and not self.task_type.by_class
        of_classes = (
            ("--label-smoothing", self.label_smoothing, "--task classification"),
            ("--positive", self.positive is not None, "--task classification"),
            ("--calibrate", self.calibrate and has_values, "a task with probabilities"),
            ("--class-weights", self.class_weights != "none" and is_numeric, "a task with classes"),
            ("--balance class", self.balance == "class" and is_numeric, "a task with classes"),
        )
        return [
            *conflicts,
            (
                len(set(columns)) < len(columns),
                UsageError(task, found=", ".join(columns), expected="columns with different names"),
            ),
            (
                self.labels is None and self.splits is None and bool(columns),
                UsageError(f"{task} needs --labels", expected="a CSV file with these columns"),
            ),
            (
                self.loss not in losses,
                UsageError("--loss", found=self.loss, expected=f"{', '.join(losses)} for {task}"),
            ),
            *(
                (is_set, UsageError(flag, found=task, expected=expected))
                for flag, is_set, expected in of_classes
            ),
        ]

    @property
    def _may_have_sets(self) -> bool:
        by = self.split_by, getattr(self, "labels_from", "slide")
        return self.task_type.has_sets and by in (("patient", "slide"), ("site", "slide"))

    @property
    def task_type(self) -> type[Task]:
        """Class of the task."""
        from histopipe.tasks.registry import TASKS

        return TASKS[self.task]

    @property
    def target_columns(self) -> tuple[str, ...]:
        """Columns of the labels file with the target; empty for classification."""
        event = f"{self.censored}=0" if self.censored else self.event
        return (self.time, event) if self.time and event else self.target

    @property
    def further_columns(self) -> tuple[str, ...]:
        """Columns of the labels file that the model does not use: those for subgroups, and of the split."""
        from histopipe.evaluation.subgroups import labels_columns

        split = () if self.split_column is None else (self.split_column,)
        return tuple(dict.fromkeys((*labels_columns(self.subgroup), *split)))

    @property
    def used_loss(self) -> str:
        """The loss of `chosen_loss`."""
        return chosen_loss(self.task, self.loss)

    @property
    def evaluation_settings(self) -> EvaluationSettings:
        """Settings of the evaluation of the best model."""
        from histopipe.tasks.predictions import EvaluationSettings

        return EvaluationSettings(
            positive=self.positive,
            threshold=self.threshold,
            top_k=self.top_k,
            resamples=self.resamples,
            seed=self.seed,
            horizon=self.horizon,
            log_hazards=self.used_loss == "cox",
        )

    def values(self) -> dict[str, Any]:
        """Return the settings by name."""
        return {name: getattr(self, name) for name in declared_settings(type(self))}
