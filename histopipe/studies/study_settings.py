"""Settings of a cross-validation, of probes and of `compare`. `--help` imports this module, so it imports nothing slow."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from histopipe.errors import UsageError
from histopipe.system.settings import check_settings, setting

ALL_PATIENTS = 100.0
_FOLDS, _PROBES = "Cross-validation", "Probes"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """Settings of a cross-validation."""

    folds: int | Literal["column"] = setting(
        0,
        "Cross-validate with this many folds, or with those in --split-column (column); 0 trains once.",
        group=_FOLDS,
        at_least=0,
    )
    seeds: int = setting(
        1,
        "Repeat everything with this many seeds: --seed and the numbers after it.",
        group=_FOLDS,
        at_least=1,
    )
    learning_curve: tuple[str, ...] = setting(
        (),
        "Also train each fold on these percentages of its training patients: 25,50. The test sets stay the same.",
        group=_FOLDS,
    )
    fold_timeout: float = setting(
        0.0,
        "Time limit for an attempt at a fold, such as 2h; 0: none.",
        group=_FOLDS,
        at_least=0,
        format="duration",
    )
    retries: int = setting(0, "Number of retries of a failed fold.", group=_FOLDS, at_least=0)
    parallel_folds: int = setting(
        1, "Number of folds trained in parallel. They share the GPUs.", group=_FOLDS, at_least=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.folds == 1:
            raise UsageError("--folds", found=1, expected="2 or more, or 0 for a single training")
        if self.learning_curve and not self.folds and self.seeds == 1:
            raise UsageError(
                "--learning-curve", found="one training", expected="several, by --folds or --seeds"
            )
        for text in self.learning_curve:
            if not re.fullmatch(r"\d{1,2}(\.\d+)?%?|100%?", text) or not float(text.rstrip("%")):
                raise UsageError(
                    "--learning-curve",
                    found=repr(text),
                    expected="percentages above 0, up to 100, such as 25,50",
                )

    @property
    def shares(self) -> list[float]:
        """Percentages of the training patients, which increase to 100."""
        return sorted({*(float(text.rstrip("%")) for text in self.learning_curve), ALL_PATIENTS})


PROBED = (
    "labels",
    "na",
    "task",
    "target",
    "time",
    "event",
    "censored",
    "allow_extra_rows",
    "bag",
    "split_by",
    "split_column",
    "positive",
    "resamples",
    "seed",
)
"""Settings of a training that `probe` takes, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """Settings of `probe`."""

    folds: int | Literal["column"] = setting(
        5, "Number of folds, or those in --split-column (column).", group=_PROBES, at_least=2
    )
    annotations: str | None = setting(
        None,
        "Probe single patches, with the classes of outlines in this folder, as of `histopipe annotate`.",
        group=_PROBES,
        format="path",
    )
    neighbours: int = setting(
        20, "Nearest neighbours of a probe, and of the robustness index.", group=_PROBES, at_least=1
    )
    shots: tuple[int, ...] = setting(
        (1, 2, 4, 8, 16), "Patients per class of the probes with few patients.", group=_PROBES
    )
    permutations: int = setting(
        0,
        "Permutations of the labels among the patients of a site, for a p value of the linear probe; 0: none.",
        group=_PROBES,
        at_least=0,
    )
    draws: int = setting(
        20, "Draws of the patients for each of these probes.", group=_PROBES, at_least=2
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if any(shots < 1 for shots in self.shots):
            raise UsageError("--shots", found=self.shots, expected="numbers of patients")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of `compare`."""

    resamples: int = setting(
        1000,
        "Bootstrap resamples of the patients for 95 % confidence intervals; 0 for none.",
        group="Options",
        at_least=0,
    )
