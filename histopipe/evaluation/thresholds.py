"""From which probability on a patch, slide or patient is taken for positive: chosen on validation data, never on test data."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.evaluation.scores import Scores

RULE = re.compile(
    r"youden|(?P<of>sensitivity|specificity)[:=](?P<least>0?\.\d+|1(\.0*)?)|(?P<fixed>0?\.\d+)"
)
"""What `--threshold` may be."""
EVEN = 0.5
FALLBACK = f"threshold {EVEN}"
"""How a note begins that says why none was chosen."""


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

    "youden" is where sensitivity + specificity is highest, "sensitivity:S" the highest threshold that still finds the share S of
    positives, "specificity:S" the lowest that still passes the share S of negatives. It lies half way between the last score that is
    taken for positive and the next one, since other data comes close to either.

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
        return EVEN, f"{FALLBACK}: one class only in validation, none could be chosen"
    passed, found, thresholds = roc_curve(
        truth, scores.probability[:, positive], drop_intermediate=False
    )
    if match["of"] is None:
        place = int(np.argmax(found - passed))
    elif match["of"] == "sensitivity":
        place = int(np.argmax(found >= float(match["least"])))
    else:
        place = int(np.flatnonzero(1 - passed >= float(match["least"]))[-1])
    return _half_way(thresholds[1:], place), None


def _half_way(scores: NDArray[np.float64], positives: int) -> float:
    """A threshold that takes the first of falling, different scores for positive."""
    if positives == 0:
        return float(np.nextafter(scores[0], np.inf))
    last, after = scores[positives - 1], scores[positives] if positives < len(scores) else 0.0
    middle = (last + after) / 2
    return float(middle if middle > after else last)
