"""Decision thresholds, chosen on validation data."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError

RULE = re.compile(
    r"youden|(?P<of>sensitivity|specificity)[:=](?P<least>0?\.\d+|1(\.0*)?)|(?P<fixed>0?\.\d+)"
)
"""Values of `--threshold`."""
EVEN = 0.5
FALLBACK = f"threshold {EVEN}"
"""Start of a note on why no threshold was chosen."""


def check_rule(rule: str) -> re.Match[str]:
    """Return the match of a rule. Raise UsageError if the text is not a rule."""
    match = RULE.fullmatch(rule)
    if match is None:
        raise UsageError(
            "--threshold", found=repr(rule),
            expected="youden, sensitivity:0.95, specificity:0.95, or a probability such as 0.5",
        )  # fmt: skip
    return match


def choose_threshold(
    event: NDArray[np.bool_], probability: NDArray[np.float64], rule: str
) -> tuple[float, str]:
    """Return the threshold that a rule chooses for (N,) events and their probabilities, with a note or "".

    "youden": highest sensitivity + specificity. "sensitivity:S": highest threshold with at least this sensitivity. "specificity:S":
    lowest threshold with at least this specificity. The threshold is half way between the last positive score and the
    next score, since scores of other data may be close to either of them.

    Source:
        W. J. Youden, Index for rating diagnostic tests, Cancer 3 (1950).
    """
    match = check_rule(rule)
    if match["fixed"]:
        return float(match["fixed"]), ""
    if event.all() or not event.any():
        return EVEN, f"{FALLBACK} used: validation has only one class"
    thresholds, score_number = np.unique(-probability, return_inverse=True)
    # The ROC curve: false and true positive rates at decreasing scores.
    false_positive, true_positive = (
        np.append(0, np.cumsum(np.bincount(score_number[members], minlength=len(thresholds))))
        / members.sum()
        for members in (~event, event)
    )
    if match["of"] is None:
        place = int(np.argmax(true_positive - false_positive))
    elif match["of"] == "sensitivity":
        place = int(np.argmax(true_positive >= float(match["least"])))
    else:
        place = int(np.flatnonzero(1 - false_positive >= float(match["least"]))[-1])
    return _half_way(-thresholds.astype(np.float64), place), ""


def _half_way(scores: NDArray[np.float64], positives: int) -> float:
    """Return a threshold for which the first `positives` of the decreasing scores are positive."""
    if positives == 0:
        return float(np.nextafter(scores[0], np.inf))
    last, after = scores[positives - 1], scores[positives] if positives < len(scores) else 0.0
    middle = (last + after) / 2
    return float(middle if middle > after else last)
