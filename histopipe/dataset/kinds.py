"""Names of what can be done to the pixels of a batch, for those who must not load TensorFlow to know them."""

from __future__ import annotations

from typing import Literal, get_args

Augmentation = Literal["flips", "crop", "stain", "colour"]
StainNorm = Literal["none", "reinhard", "macenko"]

AUGMENTATIONS: tuple[Augmentation, ...] = get_args(Augmentation)
"""In the order in which they are applied."""
