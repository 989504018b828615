"""Names that settings use, without what they stand for: this must load at once."""

from __future__ import annotations

from typing import Literal

BagOf = Literal["slide", "patient"]
