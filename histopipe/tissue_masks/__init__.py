"""Tissue masks: algorithms and networks that find tissue, and files that people can check, correct and replace."""

from __future__ import annotations

from typing import Literal, get_args

Finder = Literal["otsu-1", "otsu-2", "otsu-3"]
"""Algorithm. Defined here because the settings use it and must load without OpenCV."""
AskedFinder = Literal["otsu", Finder]
"""Algorithm as an option; "otsu" is the version of the store, else the newest."""
Tissue = Literal[Finder, "none", "masks", "model"]
"""How tissue is found: an algorithm, not at all, files of masks, or a network."""

FINDER_NAMES: tuple[Finder, ...] = get_args(Finder)
"""Names of the algorithms; `tissue_masks.algorithms` has the functions."""
NEWEST: Finder = FINDER_NAMES[-1]
"""Algorithm of new stores."""
