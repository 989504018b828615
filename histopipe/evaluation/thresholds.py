"""From which probability on a patch, slide or patient is taken for positive: chosen on validation data, never on test data."""

from __future__ import annotations

import re

import numpy as np

from histopipe.errors import UsageError
from histopipe.evaluation.scores import Scores

RULE = re.compile(
    r"youden|(?P<of>sensitivity|specificity)[:=](?P<least>0?\.\d+|1(\.0*)?)|(?P<fixed>0?\.\d+)"
)
"""What `--threshold` may be."""
EVEN = 0.5


def check_rule(rule: str) -> None:
    """Whether a rule can be followed.

    Raises:
        UsageError: it cannot.
    """
    if RULE.fullmatch(rule) is None:
        raise UsageError(
            "--threshold", found=repr(rule),
            expected="youden, sensitivity:0.95, specificity:0.95, or a probability such as 0.5",
        )  # fmt: skip


def choose_threshold(scores: Scores, positive: int, rule: str) -> tuple[float, str | None]:
    """The threshold of a rule, and what to know about it.

    It is a probability that occurs, so that "at least" is exact on the data it was chosen on. "youden" is where sensitivity +
    specificity is highest, "sensitivity:S" the highest that still finds the share S of positives, "specificity:S" the lowest that
    still passes the share S of negatives.

    Args:
        scores: of validation data.
        positive: number of the positive class.
        rule: as `--threshold`.

    Source:
        W. J. Youden, Index for rating diagnostic tests, Cancer 3 (1950).
    """
    # Late: half a second that `--help` must not take.
    from sklearn.metrics import roc_curve

    match = RULE.fullmatch(rule)
    if match is None:
        check_rule(rule)
        raise AssertionError  # check_rule has raised
    if match["fixed"]:
        return float(match["fixed"]), None
    truth = scores.label == positive
    if truth.all() or not truth.any():
        return EVEN, f"threshold {EVEN}: one class only in validation, none could be chosen"
    passed, found, thresholds = roc_curve(
        truth, scores.probability[:, positive], drop_intermediate=False
    )
    # The first one is above every score: nothing is positive.
    thresholds[0] = np.nextafter(scores.probability[:, positive].max(), np.inf)
    if match["of"] is None:
        place = int(np.argmax(found - passed))
    elif match["of"] == "sensitivity":
        place = int(np.argmax(found >= float(match["least"])))
    else:
        place = int(np.flatnonzero(1 - passed >= float(match["least"]))[-1])
    return float(thresholds[place]), None
