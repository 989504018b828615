"""Architecture of a Vision Transformer: everything but the input size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from histopipe.errors import UsageError
from histopipe.pretrained.checkpoints import Tensor
from histopipe.system.output import some


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
    positions: Literal["patches", "class", "all"] = "class"
    layer_scale: bool = True
    epsilon: float = 1e-6
    pooling: Literal["class", "class+mean", "tokens"] = "class"

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return 1 + self.registers

    @property
    def prefix_positions(self) -> int:
        """Number of tokens before the patches that have a position."""
        return {"patches": 0, "class": 1, "all": self.prefix}[self.positions]

    @property
    def dimension(self) -> int:
        """Number of features."""
        return self.width * (2 if self.pooling == "class+mean" else 1)


_CHUNK = re.compile(r"^blocks\.\d+\.(\d+)\.")
"""Numbers of a chunk of blocks and of a block: DINOv2 saves the blocks of large networks in chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Names of the weights of one library. `{}` is the number of a block.

    Attributes:
        qkv: one packed layer, or the layers of query, key and value.
        gated: names of the packed input and the output of SwiGLU.
        unused: names that are in files but not in the network.
        antialiased: method to resize positions, see `histopipe.pretrained.architecture`.
    """

    class_token: str
    registers: str
    positions: str
    patch: str
    norm1: str
    qkv: tuple[str, ...]
    projection: str
    scale1: str
    norm2: str
    plain: tuple[str, str]
    gated: tuple[str, str]
    scale2: str
    norm: str
    unused: tuple[str, ...]
    antialiased: bool


_TIMM = Naming(
    class_token="cls_token",
    registers="reg_token",
    positions="pos_embed",
    patch="patch_embed.proj",
    norm1="blocks.{}.norm1",
    qkv=("blocks.{}.attn.qkv",),
    projection="blocks.{}.attn.proj",
    scale1="blocks.{}.ls1.gamma",
    norm2="blocks.{}.norm2",
    plain=("blocks.{}.mlp.fc1", "blocks.{}.mlp.fc2"),
    gated=("blocks.{}.mlp.fc1", "blocks.{}.mlp.fc2"),
    scale2="blocks.{}.ls2.gamma",
    norm="norm",
    unused=("mask_token", "head.weight", "head.bias"),
    antialiased=True,
)
NAMINGS: Mapping[str, Naming] = MappingProxyType(
    {
        "timm": _TIMM,
        "dinov2": Naming(
            class_token="cls_token",
            registers="register_tokens",
            positions="pos_embed",
            patch="patch_embed.proj",
            norm1=_TIMM.norm1,
            qkv=_TIMM.qkv,
            projection=_TIMM.projection,
            scale1=_TIMM.scale1,
            norm2=_TIMM.norm2,
            plain=_TIMM.plain,
            gated=("blocks.{}.mlp.w12", "blocks.{}.mlp.w3"),
            scale2=_TIMM.scale2,
            norm="norm",
            unused=("mask_token",),
            antialiased=False,
        ),
        "hf-vit": Naming(
            class_token="embeddings.cls_token",
            registers="",
            positions="embeddings.position_embeddings",
            patch="embeddings.patch_embeddings.projection",
            norm1="encoder.layer.{}.layernorm_before",
            qkv=tuple(
                f"encoder.layer.{{}}.attention.attention.{n}" for n in ("query", "key", "value")
            ),
            projection="encoder.layer.{}.attention.output.dense",
            scale1="",
            norm2="encoder.layer.{}.layernorm_after",
            plain=("encoder.layer.{}.intermediate.dense", "encoder.layer.{}.output.dense"),
            gated=("", ""),
            scale2="",
            norm="layernorm",
            unused=("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias"),
            antialiased=False,
        ),
        "hf-dinov2": Naming(
            class_token="embeddings.cls_token",
            registers="embeddings.register_tokens",
            positions="embeddings.position_embeddings",
            patch="embeddings.patch_embeddings.projection",
            norm1="encoder.layer.{}.norm1",
            qkv=tuple(
                f"encoder.layer.{{}}.attention.attention.{n}" for n in ("query", "key", "value")
            ),
            projection="encoder.layer.{}.attention.output.dense",
            scale1="encoder.layer.{}.layer_scale1.lambda1",
            norm2="encoder.layer.{}.norm2",
            plain=("encoder.layer.{}.mlp.fc1", "encoder.layer.{}.mlp.fc2"),
            gated=("encoder.layer.{}.mlp.weights_in", "encoder.layer.{}.mlp.weights_out"),
            scale2="encoder.layer.{}.layer_scale2.lambda1",
            norm="layernorm",
            unused=("embeddings.mask_token",),
            antialiased=False,
        ),
    }
)


def expected_shapes(network: Architecture, naming: Naming, size: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of a checkpoint that was trained at an input size in pixels."""
    width, hidden = network.width, network.hidden
    patches = (size // network.patch) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        naming.class_token: (1, 1, width),
        naming.positions: (1, network.prefix_positions + patches, width),
        **_linear(naming.patch, (width, 3, network.patch, network.patch)),
        **_linear(naming.norm, (width,)),
    }
    if network.registers:
        shapes[naming.registers] = (1, network.registers, width)
    first, second = naming.gated if network.gated else naming.plain
    for number in range(network.depth):
        block: dict[str, tuple[int, ...]] = {
            **_linear(naming.norm1, (width,)),
            **_linear(naming.norm2, (width,)),
            **_linear(naming.projection, (width, width)),
            **_linear(first, (hidden * (2 if network.gated else 1), width)),
            **_linear(second, (width, hidden)),
        }
        for name in naming.qkv:
            block |= _linear(name, (width * 3 // len(naming.qkv), width))
        if network.layer_scale:
            block |= {naming.scale1: (width,), naming.scale2: (width,)}
        shapes |= {name.format(number): shape for name, shape in block.items()}
    return shapes


def select(
    tensors: Mapping[str, Tensor], network: Architecture, naming: Naming, size: int, path: Path
) -> dict[str, Tensor]:
    """Return the tensors of the network by their names in `naming`, without the prefixes of wrappers.

    Raises:
        UsageError: tensors are missing, surplus or misshapen.
    """
    expected = expected_shapes(network, naming, size)
    prefix = _prefix(tensors, naming, path)
    selected = {
        _CHUNK.sub(r"blocks.\1.", name.removeprefix(prefix)): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    selected = {name: tensor for name, tensor in selected.items() if name not in naming.unused}
    problems = {
        "missing": sorted(expected.keys() - selected.keys()),
        "surplus": sorted(selected.keys() - expected.keys()),
        "misshapen": [
            f"{name} {selected[name].shape} for {shape}"
            for name, shape in expected.items()
            if name in selected and selected[name].shape != shape
        ],
    }
    texts = [f"{len(names)} {kind}: {some(names, 5)}" for kind, names in problems.items() if names]
    if texts:
        raise UsageError(
            f"{path} has the weights of another network",
            found="; ".join(texts),
            expected=f"{len(expected)} weights such as {next(iter(expected))}",
            todo="check that file and --model belong together",
        )
    return selected


def _prefix(tensors: Mapping[str, Tensor], naming: Naming, path: Path) -> str:
    """Return the prefix of all names, which training programs add. Of a teacher and a student, take the teacher."""
    candidates = [
        name.removesuffix(naming.class_token)
        for name in tensors
        if name.endswith(naming.class_token)
    ]
    prefixes = [prefix for prefix in candidates if "teacher" in prefix] or candidates
    if len(prefixes) > 1:
        raise UsageError(
            f"{path} has the weights of several networks",
            found=some(prefixes, 5),
            expected="one network",
        )
    return prefixes[0] if prefixes else ""


def _linear(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


Interpolation = Literal["bilinear", "bicubic"]


def resampling_matrix(
    source: int, target: int, interpolation: Interpolation, *, antialiased: bool = True
) -> NDArray[np.float64]:
    """Return the (source, target) weights that resize one dimension.

    Antialiased: the kernel is widened when reducing, and cut off at the edges, as in PIL and timm; bicubic with a = -0.5.
    Otherwise: edges are repeated, and a = -0.75, as in PyTorch's `interpolate`.
    """
    scale, radius = source / target, 1 if interpolation == "bilinear" else 2
    width = max(scale, 1.0) if antialiased else 1.0
    centres = (np.arange(target) + 0.5) * scale - 0.5
    first = np.floor(centres - radius * width).astype(int)
    places = first[:, None] + np.arange(int(np.ceil(2 * radius * width)) + 2)[None, :]
    distances = np.abs(places - centres[:, None]) / width
    weights = (
        np.maximum(1 - distances, 0)
        if interpolation == "bilinear"
        else _cubic(distances, -0.5 if antialiased else -0.75)
    )
    if antialiased:
        weights = np.where((places >= 0) & (places < source), weights, 0.0)
    weights /= weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((source, target))
    np.add.at(matrix, (places.clip(0, source - 1), np.arange(target)[:, None]), weights)
    return matrix


def resize_positions(
    values: NDArray[np.float32], side: int, *, antialiased: bool
) -> NDArray[np.float32]:
    """Resize (G * G, D) position embeddings to (side * side, D), bicubic.

    timm's are antialiased. Hugging Face's ViT and Dinov2 without registers are not.
    """
    grid = round(len(values) ** 0.5)
    if grid == side:
        return values
    matrix = resampling_matrix(grid, side, "bicubic", antialiased=antialiased)
    image = values.reshape(grid, grid, -1).astype(np.float64)
    resized = np.einsum("iy,jx,ijd->yxd", matrix, matrix, image)
    return np.asarray(resized.reshape(side * side, -1), np.float32)


def _cubic(x: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
