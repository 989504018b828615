"""Options of tissue masks: their choices, and checks. The module imports nothing slow, since `--help` lists the choices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from histopipe.errors import UsageError
from histopipe.system.settings import check_settings, setting

Finder = Literal["otsu-1", "otsu-2", "otsu-3"]
"""Algorithm. Defined here because the settings use it and must load without OpenCV."""
AskedFinder = Literal["otsu", Finder]
"""Algorithm as an option; "otsu" is the version of the store, else the newest."""
Tissue = Literal[Finder, "none", "masks", "model"]
"""How tissue is found: an algorithm, not at all, files of masks, or a network."""

FINDER_NAMES: tuple[Finder, ...] = get_args(Finder)
"""Names of the algorithms; `tiling.algorithms` has the functions."""
NEWEST: Finder = "otsu-3"
"""Algorithm of new stores."""

TISSUE = "Tissue"
TissueCheck = Literal["off", "warn", "fail"]
_RANGE = re.compile(r"#([0-9a-f]{6})|(\d{1,5})(?:-(\d{1,5}))?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MaskRules:
    """Settings for masks of other tools.

    Raises:
        UsageError: a value is not one of these.
    """

    tissue_values: str | None = setting(
        None,
        "Values of PNG masks that are tissue: 255, 1,3, 128-255, or a colour such as '#ff0000'.",
        group=TISSUE,
        default_text="the one above 0; masks of more values are refused",
    )
    tissue_check: TissueCheck = setting(
        "fail",
        "A mask that takes glass and leaves tissue, compared with otsu-3: its slide fails, or gets a note (warn).",
        group=TISSUE,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        ranges_of_values(self.tissue_values or "0")


def ranges_of_values(text: str) -> list[tuple[bool, int, int]]:
    """Return whether each part of `tissue_values` is a colour, and its first and last value; a colour is 0xRRGGBB.

    Raises:
        UsageError: the text has another form.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[3] or match[2] or 0) < int(match[2] or 0):
            raise UsageError(
                "--tissue-values", found=repr(text), expected="such as 255, 1,3, 128-255 or #ff0000"
            )
        colour, low, high = match.groups()
        first = int(colour, 16) if colour else int(low)
        ranges.append((bool(colour), first, int(high or first)))
    return ranges
