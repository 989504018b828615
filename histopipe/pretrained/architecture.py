"""Architectures of patch and slide encoders, and the weights that their files must have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
        pooling: "class" token, "class+mean" of the class token and the mean patch token, "attention" of one learned
            query to all tokens (CONCH), or all "tokens".
        pool_width, pool_heads: features, and attention heads, of the pooling "attention".
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
    pooling: Literal["class", "class+mean", "attention", "tokens"] = "class"
    pool_width: int = 0
    pool_heads: int = 8

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches."""
        return 1 + self.registers

    @property
    def prefix_positions(self) -> int:
        """Number of tokens before the patches that have a position."""
        return {"patches": 0, "class": 1, "all": self.prefix}[self.positions]

    @property
    def mlp(self) -> str:
        """Kind of the feed-forward network, in the names of its weights; see `Naming`."""
        return "gated" if self.gated else "plain"

    @property
    def dimension(self) -> int:
        """Number of features."""
        return self.pool_width or self.width * (2 if self.pooling == "class+mean" else 1)


Family = Literal["abmil", "clam", "madeleine", "moozy", "titan", "longnet", "perceiver"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideArchitecture:
    """Architecture of a slide encoder.

    Attributes:
        family: kind of the network, see `histopipe.training.slide_networks`.
        features: number of features of a patch.
        width: of the tokens, or hidden features, and of the vector except with the pooling "inputs".
        hidden: width of feed-forward networks, or of gated attention.
        depth, heads: number of blocks, and of attention heads.
        inner_depth: number of blocks of a Perceiver after each attention to the patches.
        patient_depth: number of blocks of the transformer of a patient's slides; 0: none.
        latents: number of queries of a Perceiver.
        segments, ratios: lengths and dilations of LongNet's attention.
        pooling: "attention", attention over "inputs" of the network, the "class" token or the "mean" of the patches.
    """

    family: Family
    features: int
    width: int
    hidden: int
    depth: int = 1
    heads: int = 1
    inner_depth: int = 0
    patient_depth: int = 0
    latents: int = 0
    segments: tuple[int, ...] = ()
    ratios: tuple[int, ...] = ()
    pooling: Literal["attention", "inputs", "class", "mean"] = "class"

    @property
    def dimension(self) -> int:
        """Number of values of the vector of a slide."""
        return self.features if self.pooling == "inputs" else self.width

    @property
    def has_attention(self) -> bool:
        """Whether the network pools patches by attention."""
        return self.family not in ("moozy", "longnet")


_CHUNK = re.compile(r"(^|\.)blocks\.\d+\.(\d+)\.")
"""Numbers of a chunk of blocks and of a block: DINOv2 saves the blocks of large networks in chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Names of the weights of one library.

    Attributes:
        names: name of each part of the network; `{}` is the number of a block. "gated_in" and "gated_out" are the packed
            input and the output of SwiGLU, "plain_in" and "plain_out" those of GELU. Without parts that the library lacks.
        qkv: one packed layer, or the layers of query, key and value.
        unused: names that are in files but not in the network.
        antialiased: method to resize positions, see `histopipe.pretrained.architecture`.
        pool: shape of each weight of the pooling "attention", in widths of the tokens "t" and of the features "f".
    """

    names: Mapping[str, str]
    qkv: tuple[str, ...]
    unused: tuple[str, ...]
    antialiased: bool
    pool: Mapping[str, str] = field(default_factory=dict)


_TIMM = {
    "class_token": "cls_token",
    "registers": "reg_token",
    "positions": "pos_embed",
    "patch": "patch_embed.proj",
    "norm1": "blocks.{}.norm1",
    "projection": "blocks.{}.attn.proj",
    "scale1": "blocks.{}.ls1.gamma",
    "norm2": "blocks.{}.norm2",
    "plain_in": "blocks.{}.mlp.fc1",
    "plain_out": "blocks.{}.mlp.fc2",
    "gated_in": "blocks.{}.mlp.fc1",
    "gated_out": "blocks.{}.mlp.fc2",
    "scale2": "blocks.{}.ls2.gamma",
    "norm": "norm",
}
_VIT = {
    "class_token": "embeddings.cls_token",
    "positions": "embeddings.position_embeddings",
    "patch": "embeddings.patch_embeddings.projection",
    "norm1": "encoder.layer.{}.layernorm_before",
    "projection": "encoder.layer.{}.attention.output.dense",
    "norm2": "encoder.layer.{}.layernorm_after",
    "plain_in": "encoder.layer.{}.intermediate.dense",
    "plain_out": "encoder.layer.{}.output.dense",
    "norm": "layernorm",
}
"""Names of ViT in the library transformers."""
_VIT_QKV = tuple(
    f"encoder.layer.{{}}.attention.attention.{name}" for name in ("query", "key", "value")
)
POOL, POOL_NORM = "attn_pool_contrast", "ln_contrast"
_POOL = {
    **dict.fromkeys((f"{POOL}.query",), "1f"),
    **dict.fromkeys((f"{POOL}.ln_k.{part}" for part in ("weight", "bias")), "t"),
    **dict.fromkeys(
        (f"{n}.{p}" for n in (f"{POOL}.ln_q", POOL_NORM) for p in ("weight", "bias")), "f"
    ),
}
"""Weights that the pooling has in both versions of CONCH."""
_CONCH = {key: f"trunk.{name}" for key, name in _TIMM.items() if key != "registers"}
NAMINGS: Mapping[str, Naming] = {
    "timm": Naming(
        names=_TIMM,
        qkv=("blocks.{}.attn.qkv",),
        unused=("mask_token", "head.weight", "head.bias"),
        antialiased=True,
    ),
    "dinov2": Naming(
        names={
            **_TIMM,
            "registers": "register_tokens",
            "gated_in": "blocks.{}.mlp.w12",
            "gated_out": "blocks.{}.mlp.w3",
        },
        qkv=("blocks.{}.attn.qkv",),
        unused=("mask_token",),
        antialiased=False,
    ),
    "hf-vit": Naming(
        names=_VIT,
        qkv=_VIT_QKV,
        unused=("embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias"),
        antialiased=False,
    ),
    "hf-dinov2": Naming(
        names={
            **_VIT,
            "registers": "embeddings.register_tokens",
            "norm1": "encoder.layer.{}.norm1",
            "scale1": "encoder.layer.{}.layer_scale1.lambda1",
            "norm2": "encoder.layer.{}.norm2",
            "plain_in": "encoder.layer.{}.mlp.fc1",
            "plain_out": "encoder.layer.{}.mlp.fc2",
            "gated_in": "encoder.layer.{}.mlp.weights_in",
            "gated_out": "encoder.layer.{}.mlp.weights_out",
            "scale2": "encoder.layer.{}.layer_scale2.lambda1",
        },
        qkv=_VIT_QKV,
        unused=("embeddings.mask_token",),
        antialiased=False,
    ),
    "conch": Naming(
        names={key: name for key, name in _CONCH.items() if not key.startswith("scale")},
        qkv=("trunk.blocks.{}.attn.qkv",),
        unused=(
            "proj_contrast",
            *(
                f"attn_pool_caption.{n}"
                for n in (
                    "query",
                    "attn.q_proj_weight",
                    "attn.k_proj_weight",
                    "attn.v_proj_weight",
                    "attn.in_proj_bias",
                    "attn.out_proj.weight",
                    "attn.out_proj.bias",
                    "ln_q.weight",
                    "ln_q.bias",
                    "ln_k.weight",
                    "ln_k.bias",
                )
            ),
            "ln_caption.weight",
            "ln_caption.bias",
        ),
        antialiased=True,
        pool={
            **_POOL,
            f"{POOL}.attn.q_proj_weight": "ff",
            f"{POOL}.attn.k_proj_weight": "ft",
            f"{POOL}.attn.v_proj_weight": "ft",
            f"{POOL}.attn.in_proj_bias": "3",
            f"{POOL}.attn.out_proj.weight": "ff",
            f"{POOL}.attn.out_proj.bias": "f",
        },
    ),
    "conch-v1.5": Naming(
        names=_CONCH,
        qkv=("trunk.blocks.{}.attn.qkv",),
        unused=(),
        antialiased=True,
        pool={
            **_POOL,
            f"{POOL}.to_q.weight": "ff",
            f"{POOL}.to_kv.weight": "2t",
            f"{POOL}.to_out.weight": "ff",
        },
    ),
}


def expected_shapes(network: Architecture, naming: Naming, size: int) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of a checkpoint that was trained at an input size in pixels."""
    width, hidden, names = network.width, network.hidden, naming.names
    shapes: dict[str, tuple[int, ...]] = {
        names["class_token"]: (1, 1, width),
        names["positions"]: (1, network.prefix_positions + (size // network.patch) ** 2, width),
        **_linear(names["patch"], (width, 3, network.patch, network.patch)),
        **_linear(names["norm"], (width,)),
    }
    sizes = {
        "1": 1,
        "2": 2 * network.pool_width,
        "3": 3 * network.pool_width,
        "t": width,
        "f": network.pool_width,
    }
    if network.pooling == "attention":
        shapes |= {name: tuple(map(sizes.__getitem__, axes)) for name, axes in naming.pool.items()}
    if network.registers:
        shapes[names["registers"]] = (1, network.registers, width)
    for number in range(network.depth):
        block: dict[str, tuple[int, ...]] = {
            **_linear(names["norm1"], (width,)),
            **_linear(names["norm2"], (width,)),
            **_linear(names["projection"], (width, width)),
            **_linear(names[f"{network.mlp}_in"], (hidden * (2 if network.gated else 1), width)),
            **_linear(names[f"{network.mlp}_out"], (width, hidden)),
        }
        for name in naming.qkv:
            block |= _linear(name, (width * 3 // len(naming.qkv), width))
        if network.layer_scale:
            block |= {names["scale1"]: (width,), names["scale2"]: (width,)}
        shapes |= {name.format(number): shape for name, shape in block.items()}
    return shapes


def select(
    tensors: Mapping[str, Tensor], network: Architecture, naming: Naming, size: int, path: Path
) -> dict[str, Tensor]:
    """Return the tensors of a Vision Transformer by their names in `naming`, without the prefixes of wrappers.

    Raises:
        UsageError: tensors are missing, surplus or misshapen.
    """
    return select_weights(
        {_CHUNK.sub(r"\1blocks.\2.", name): tensor for name, tensor in tensors.items()},
        expected_shapes(network, naming, size),
        path,
        first=naming.names["class_token"],
        unused=f"({'|'.join(map(re.escape, naming.unused))})$",
    )


def select_weights(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    path: Path,
    *,
    first: str,
    unused: str,
) -> dict[str, Tensor]:
    """Return the tensors of a network by their names, without the prefix of wrappers.

    Args:
        tensors: those of the file.
        expected: name and shape of each weight.
        path: the file.
        first: name of a weight that each file has.
        unused: pattern of names that the network does not use.

    Raises:
        UsageError: tensors are missing, surplus or misshapen.
    """
    prefix = common_prefix(tensors, first, path)
    names = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
    selected = {
        name: tensors[full]
        for name, full in names.items()
        if name in expected or not re.match(unused, name)
    }
    check_shapes(selected, expected, path)
    return selected


def check_shapes(
    selected: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Raise a UsageError if tensors of a file are missing, surplus or misshapen."""
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


def common_prefix(tensors: Mapping[str, Tensor], first: str, path: Path) -> str:
    """Return the prefix of all names, which training programs add before the weight `first`.

    Of a teacher and a student, take the teacher.

    Raises:
        UsageError: the file has several networks.
    """
    candidates = [name.removesuffix(first) for name in tensors if name.endswith(first)]
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
