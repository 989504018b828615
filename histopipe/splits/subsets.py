"""The subsets of a split, and the choices for how slides are divided into them.

The module imports nothing slow, since `--help` lists the choices.
"""

from __future__ import annotations

from typing import Literal, get_args

Subset = Literal["train", "validation", "test", "calibration"]
SplitBy = Literal["patient", "site", "slide", "region", "patch"]
LabelsFrom = Literal["slide", "annotation"]

SUBSETS: tuple[Subset, ...] = get_args(Subset)
EVALUATED = SUBSETS[:3]
"""Those that fractions divide, and that have metrics. Patients who calibrate prediction sets are set aside from training."""
TRAIN, VALIDATION, TEST, CALIBRATION = range(len(SUBSETS))
"""Numbers of the subsets, as in arrays."""
