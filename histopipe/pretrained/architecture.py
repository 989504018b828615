"""Architecture of a Vision Transformer: everything but the input size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenPooling = Literal["class", "class+mean", "tokens"]
Positions = Literal["patches", "class", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Architecture of a Vision Transformer.

    Attributes:
        patch: side of a patch of the network in pixels.
        width, depth, heads: features per token, number of blocks, and attention heads per block.
        hidden: width of the feed-forward network.
        gated: SwiGLU instead of GELU.
        registers: number of register tokens after the class token.
        positions: tokens with a position: only "patches", also the "class" token, or "all" with registers.
        layer_scale: the checkpoint has LayerScale.
        epsilon: of the norms.
        pooling: "class" token, "class+mean" of the class token and the mean patch token, or all "tokens".
    """

    patch: int
    width: int
    depth: int
    heads: int
    hidden: int
    gated: bool = False
    registers: int = 0
    positions: Positions = "class"
    layer_scale: bool = True
    epsilon: float = 1e-6
    pooling: TokenPooling = "class"

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return 1 + self.registers

    @property
    def dimension(self) -> int:
        """Number of features."""
        return self.width * (2 if self.pooling == "class+mean" else 1)
