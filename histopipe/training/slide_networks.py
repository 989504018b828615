"""Slide encoders: networks from the features of all patches of a slide to one vector.

Each family is one function, which asks for its weights by their published names, so that it also describes the file.

Source:
    Lu et al. 2021 (CLAM), Shao et al. 2025 (FEATHER), Wang et al. 2024 (CHIEF), Jaume et al. 2024 (Madeleine): gated attention.
    Ding et al. 2024 (TITAN), and MOOZY (2026): transformers with a bias by distance, ALiBi of Press et al. 2022.
    Xu et al. 2024 (Prov-GigaPath), Ding et al. 2023 (LongNet): dilated attention.
    Shaikovski et al. 2024 (PRISM): Perceiver of Jaegle et al. 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.pretrained.architecture import SlideArchitecture
from histopipe.training.slide_layers import (
    PlacedPatches,
    SlideVector,
    Weights,
    attend,
    gelu,
    in_rows,
    join_heads,
    patch_share,
    split_heads,
)

_NOTHING = -1e8
"""Logarithm of the weight of a token in a part of LongNet's attention that does not contain it."""


def _gated(
    network: SlideArchitecture, w: Weights, patches: PlacedPatches, first: str, attention: str
) -> SlideVector:
    hidden = tf.nn.relu(w.linear(patches.features, first, network.width))
    scores = _gated_scores(network, w, hidden, attention)
    shares = tf.nn.softmax(scores, axis=0)
    # CHIEF returns the mean of its inputs.
    values = patches.features if network.pooling == "inputs" else hidden
    return SlideVector(
        tf.linalg.matvec(tf.cast(values, tf.float32), shares[:, 0], True), shares[:, 0]
    )


def _gated_scores(network: SlideArchitecture, w: Weights, hidden: Any, name: str) -> Any:
    """Return (N, 1) float32 scores of gated attention."""
    tanh = tf.tanh(w.linear(hidden, f"{name}.attention_a.0", network.hidden))
    gate = tf.sigmoid(w.linear(hidden, f"{name}.attention_b.0", network.hidden))
    return tf.cast(w.linear(tanh * gate, f"{name}.attention_c", 1), tf.float32)


def _madeleine(network: SlideArchitecture, w: Weights, patches: PlacedPatches) -> SlideVector:
    x, width, heads = patches.features, network.width, network.heads
    for number, outputs in zip((0, 4, 8), (width, width, width * heads), strict=True):
        x = w.linear(x, f"wsi_embedders.pre_attn.{number}", outputs)
        x = gelu(w.norm(x, f"wsi_embedders.pre_attn.{number + 1}"))
    x = tf.reshape(x, (x.shape[0], width, heads))  # the heads of a feature are neighbours
    shares = [
        tf.nn.softmax(
            _gated_scores(network, w, x[:, :, head], f"wsi_embedders.attn.{head}"), axis=0
        )
        for head in range(heads)
    ]
    pooled = tf.einsum("nwh,nh->wh", x, tf.concat(shares, 1))
    value = w.linear(tf.reshape(pooled, (1, width * heads)), "projector", width)
    return SlideVector(
        tf.cast(value[0], tf.float32), patch_share(tf.transpose(tf.concat(shares, 1)))
    )


def _distance_bias(
    cells: NDArray[np.float64], prefix: int, slopes: Any
) -> Callable[[slice, slice], Any]:
    """Return a bias of attention: the distance of two patches times the slope of the head; 0 for other tokens, first."""
    places = np.concatenate([np.zeros((prefix, 2)), cells]).astype(np.float32)
    x, y = (tf.constant(places[:, axis]) for axis in (0, 1))
    is_patch = tf.constant((np.arange(len(places)) >= prefix).astype(np.float32))

    @lru_cache(1)  # the same for all heads
    def distances(first: int, end: int) -> Any:
        far = [(axis[first:end, None] - axis[None]) ** 2 for axis in (x, y)]
        return tf.sqrt(far[0] + far[1]) * (is_patch[first:end, None] * is_patch[None])

    by_head = tf.reshape(slopes, (-1, 1, 1))
    return lambda at, heads: by_head[heads] * distances(at.start, at.stop)


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head; between powers of 2 every other one of the next power."""
    power = 1 << int(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2.0 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]


def _blocks(names: str, depth: int, *parts: Callable[..., Any]) -> list[Callable[[Any], Any]]:
    """Return the residual parts of all blocks, whose names are `names` with a number."""
    return [partial(part, name=names.format(n)) for n in range(depth) for part in parts]


def _transformer(x: Any, layers: Sequence[Callable[[Any], Any]]) -> Any:
    """Apply the residual parts of a transformer."""
    for layer in layers:
        x = x + tf.cast(layer(x), tf.float32)
    return x


def _mlp(w: Weights, x: Any, name: str, width: int) -> Any:
    hidden = gelu(w.linear(x, f"{name}.fc1", width))
    return w.linear(hidden, f"{name}.fc2", x.shape[-1])


def _moozy_layers(
    network: SlideArchitecture, w: Weights, prefix: str, depth: int, bias: Any
) -> list[Callable[[Any], Any]]:
    """Return the residual parts of MOOZY's transformers, of patches and of slides."""

    def scaled(x: Any, name: str) -> Any:
        return x * tf.cast(w(name, network.width), x.dtype) if w.has(name) else x

    def attention(x: Any, name: str) -> Any:
        x = w.norm(x, f"{name}.norm1")
        q, k, v = (
            split_heads(w.linear(x, f"{name}.{p}_proj", network.width), network.heads)
            for p in "qkv"
        )
        if w.has(f"{name}.q_norm.weight"):
            q, k = (
                tf.cast(w.norm(y, f"{name}.{p}_norm"), w.dtype) for y, p in ((q, "q"), (k, "k"))
            )
        x = w.linear(join_heads(attend(q, k, v, bias)[0]), f"{name}.out_proj", network.width)
        return scaled(x, f"{name}.ls_attn.gamma")

    def mlp(x: Any, name: str) -> Any:
        x = in_rows(lambda rows: _mlp(w, w.norm(rows, f"{name}.norm2"), name, network.hidden), x)
        return scaled(x, f"{name}.ls_mlp.gamma")

    return _blocks(f"{prefix}.blocks.{{}}", depth, attention, mlp)


_MOOZY, _CASE = "teacher_slide_encoder", "case_transformer"


def _moozy(network: SlideArchitecture, w: Weights, patches: PlacedPatches) -> SlideVector:
    width, name = network.width, _MOOZY
    x = gelu(w.linear(patches.features, f"{name}.input_proj.0", width))
    tokens = [w(f"{name}.cls_token", 1, 1, width)[0], w(f"{name}.register_tokens", 1, 4, width)[0]]
    x = tf.concat([*tokens, tf.cast(x, tf.float32)], 0)
    bias = _distance_bias(patches.grid(), 5, w(f"{name}.pos_bias.slopes", network.heads, 1))
    x = _transformer(x, _moozy_layers(network, w, name, network.depth, bias))
    return SlideVector(w.norm(x[:1], f"{name}.norm")[0])


def moozy_patient(network: SlideArchitecture, w: Weights, slides: Any) -> Any:
    """Return the (W,) vector of a patient from (S, W) vectors of slides."""
    x = tf.concat([w(f"{_CASE}.case_token", 1, 1, network.width)[0], slides], 0)
    x = _transformer(x, _moozy_layers(network, w, _CASE, network.patient_depth, None))
    return w.norm(x[:1], f"{_CASE}.norm")[0]


def _titan(network: SlideArchitecture, w: Weights, patches: PlacedPatches) -> SlideVector:
    width, heads, epsilon = network.width, network.heads, 1e-6
    x = gelu(w.linear(patches.features, "patch_embed.0", width))
    x = tf.concat([w("cls_token", 1, 1, width)[0], tf.cast(x, tf.float32)], 0)
    bias = _distance_bias(patches.grid(), 1, -tf.constant(alibi_slopes(heads)))

    def attention(x: Any, name: str) -> Any:
        qkv = w.linear(w.norm(x, f"{name}.norm1", epsilon), f"{name}.attn.qkv", 3 * width)
        q, k, v = (split_heads(part, heads) for part in tf.split(qkv, 3, axis=1))
        return w.linear(join_heads(attend(q, k, v, bias)[0]), f"{name}.attn.proj", width)

    def mlp(x: Any, name: str) -> Any:
        return in_rows(
            lambda rows: _mlp(
                w, w.norm(rows, f"{name}.norm2", epsilon), f"{name}.mlp", network.hidden
            ),
            x,
        )

    layers = _blocks("blocks.modules_list.{}", network.depth, attention, mlp)
    x = w.norm(_transformer(x, layers), "norm", epsilon)
    name, pool_heads = "attn_pool_contrastive", 8
    q = w.norm(w(f"{name}.query", 1, width), f"{name}.ln_q")
    value, shares = _packed_attention(w, f"{name}.attn", q, w.norm(x, f"{name}.ln_k"), pool_heads)
    return SlideVector(tf.cast(value[0], tf.float32), patch_share(shares, 1))


def _packed_attention(
    w: Weights, name: str, queries: Any, x: Any, heads: int, *, bias: bool = True
) -> tuple[Any, Any]:
    """Attend as PyTorch's `MultiheadAttention`. Return (Q, W), and the (H, T) attention of the first query."""
    width = x.shape[-1]
    kernels = tf.split(tf.cast(w(f"{name}.in_proj_weight", 3 * width, width), w.dtype), 3)
    q, k, v = (
        tf.matmul(tf.cast(y, w.dtype), kernel, transpose_b=True)
        for y, kernel in zip((queries, x, x), kernels, strict=True)
    )
    if bias:
        offsets = tf.split(tf.cast(w(f"{name}.in_proj_bias", 3 * width), w.dtype), 3)
        q, k, v = (y + offset for y, offset in zip((q, k, v), offsets, strict=True))
    q, k, v = (split_heads(y, heads) for y in (q, k, v))
    value, norm = attend(q, k, v)
    scores = tf.cast(tf.einsum("hd,htd->ht", q[:, 0], k), tf.float32) / math.sqrt(q.shape[-1])
    joined = w.linear(join_heads(value), f"{name}.out_proj", width, bias=bias)
    return joined, tf.exp(scores - norm[:, :1])


def _sparse(x: Any, length: int, ratio: int) -> Any:
    """Return (H * S, T / r, D): every r-th token of each of S segments of (H, N, D), from another one by head."""
    heads, count, size = x.shape
    number, inner = -(-count // length), -(-length // ratio)
    x = tf.pad(x, [[0, 0], [0, number * length - count], [0, 0]])
    x = tf.reshape(x, (heads, number, length, size))
    x = tf.pad(x, [[0, 0], [0, 0], [0, inner * ratio - length], [0, 0]])
    x = tf.reshape(x, (ratio, heads // ratio, number, inner, ratio, size))
    x = tf.concat([x[group, :, :, :, group] for group in range(ratio)], 0)
    return tf.reshape(x, (heads * number, inner, size))


def _dense(  # noqa: PLR0917 - shapes
    x: Any, heads: int, count: int, length: int, ratio: int, filled: float
) -> Any:
    """Return the (H, N, D) of which `_sparse` takes some; `filled` elsewhere."""
    size, number, inner = x.shape[-1], -(-count // length), -(-length // ratio)
    x = tf.reshape(x, (heads, number, inner, 1, size))
    group = tf.reshape(tf.range(heads) // (heads // ratio), (heads, 1, 1, 1, 1))
    here = tf.equal(tf.reshape(tf.range(ratio), (1, 1, 1, ratio, 1)), group)
    x = tf.reshape(tf.where(here, x, filled), (heads, number, inner * ratio, size))
    return tf.reshape(x[:, :, :length], (heads, number * length, size))[:, :count]


def _dilated(q: Any, k: Any, v: Any, segments: Sequence[int], ratios: Sequence[int]) -> Any:
    """Return dilated attention of (H, T, D): in segments, of every r-th token, which differs by head.

    As in the published network, places after the last token are tokens of zeros.
    """
    heads, count, _ = q.shape
    values, norms = [], []
    for longest, ratio in zip(segments, ratios, strict=True):
        length = min(longest, count)
        value, norm = attend(*(_sparse(x, length, ratio) for x in (q, k, v)))
        values.append(_dense(value, heads, count, length, ratio, 0.0))
        norms.append(_dense(norm[..., None], heads, count, length, ratio, _NOTHING))
    shares = tf.unstack(tf.nn.softmax(tf.stack(norms), axis=0))
    return tf.add_n(
        [value * tf.cast(share, value.dtype) for value, share in zip(values, shares, strict=True)]
    )


def _sine_positions(places: NDArray[np.float64], width: int) -> NDArray[np.float32]:
    """Return (N, width) sine and cosine waves of (N, 2) columns and rows: half of the features of each."""
    rates = 1.0 / 10000 ** (np.arange(width // 4) / (width / 4))
    # The published table has the rows first.
    angles = [np.floor(places[:, axis])[:, None] * rates for axis in (1, 0)]
    return np.concatenate([wave(a) for a in angles for wave in (np.sin, np.cos)], 1).astype(
        np.float32
    )


def _longnet(network: SlideArchitecture, w: Weights, patches: PlacedPatches) -> SlideVector:
    width, heads = network.width, network.heads
    patches.grid()  # raises without places
    x = tf.cast(w.linear(patches.features, "patch_embed.proj", width), tf.float32)
    x = x + _sine_positions(np.asarray(patches.corners) / patches.side, width)
    x = tf.concat([w("cls_token", 1, 1, width)[0], x], 0)

    def attention(x: Any, name: str) -> Any:
        x = w.norm(x, f"{name}.self_attn_layer_norm")
        q, k, v = (
            split_heads(w.linear(x, f"{name}.self_attn.{p}_proj", width), heads) for p in "qkv"
        )
        x = w.norm(
            join_heads(_dilated(q, k, v, network.segments, network.ratios)),
            f"{name}.self_attn.inner_attn_ln",
        )
        return w.linear(x, f"{name}.self_attn.out_proj", width)

    def rows(x: Any, name: str) -> Any:
        x = w.norm(x, f"{name}.final_layer_norm")
        x = gelu(tf.cast(w.linear(x, f"{name}.ffn.fc1", network.hidden), tf.float32))
        return w.linear(w.norm(x, f"{name}.ffn.ffn_layernorm"), f"{name}.ffn.fc2", width)

    def mlp(x: Any, name: str) -> Any:
        return in_rows(partial(rows, name=name), x)

    x = _transformer(x, _blocks("encoder.layers.{}", network.depth, attention, mlp))
    x = x[:1] if network.pooling == "class" else tf.reduce_mean(x[1:], axis=0, keepdims=True)
    return SlideVector(w.norm(x, "norm", 1e-6)[0])


def _perceiver(network: SlideArchitecture, w: Weights, patches: PlacedPatches) -> SlideVector:
    """Only the first two cross attentions, and the first transformer, have separate weights."""
    width, name = network.width, "perceiver.layers"

    def feed_forward(x: Any, name: str) -> Any:
        inner = w.linear(w.norm(x, f"{name}.norm"), f"{name}.net.0", 2 * network.hidden)
        inner, gates = tf.split(inner, 2, axis=-1)
        return w.linear(inner * gelu(gates), f"{name}.net.2", width)

    def transform(x: Any, name: str) -> Any:
        normed = w.norm(x, f"{name}.norm")
        return _packed_attention(w, f"{name}.mha", normed, normed, network.heads, bias=False)[0]

    x = w("perceiver.latents", network.latents, width)
    for layer in range(network.depth):
        cross = f"{name}.{min(layer, 1)}.xattn"
        if layer < 2:
            both = w.linear(patches.features, f"{cross}.xattn.to_kv", 2 * width, bias=False)
            k, v = (part[None] for part in tf.split(both, 2, axis=-1))
        normed = w.norm(x, f"{cross}.xattn.x_norm")
        q = w.linear(normed, f"{cross}.xattn.to_q", width, bias=False)[None]
        value, norm = attend(q, k, v)
        scores = tf.cast(tf.einsum("qd,td->qt", q[0, :1], k[0]), tf.float32) / math.sqrt(width)
        shares = tf.exp(scores - norm[:, :1])
        x = x + tf.cast(w.linear(value[0], f"{cross}.xattn.to_out", width, bias=False), tf.float32)
        inner: list[Callable[[Any], Any]] = [partial(feed_forward, name=f"{cross}.ff")]
        for block in range(network.inner_depth):
            inner += [
                partial(transform, name=f"{name}.0.tf.{block}.mhsa"),
                partial(feed_forward, name=f"{name}.0.tf.{block}.ff"),
            ]
        x = _transformer(x, inner)
    return SlideVector(w.norm(x[:1], "cls_norm")[0], patch_share(shares))


class NetworkFamily(NamedTuple):
    """A kind of network."""

    encode: Callable[[SlideArchitecture, Weights, PlacedPatches], SlideVector]
    first: str
    """Name of a weight that each file has; what is before it is a prefix of all names."""
    unused: str
    """Pattern of the names of weights that are in files but not in the network."""


FAMILIES: Mapping[str, NetworkFamily] = {
    "abmil": NetworkFamily(
        partial(_gated, first="patch_embed.0", attention="global_attn"),
        "patch_embed.0.weight",
        r"classifier\.",
    ),
    "clam": NetworkFamily(
        partial(_gated, first="attention_net.0", attention="attention_net.3"),
        "attention_net.0.weight",
        r"(instance_)?classifiers\.|att_head\.|text_to_vision\.|organ_embedding",
    ),
    "madeleine": NetworkFamily(
        _madeleine, "wsi_embedders.pre_attn.0.weight", r"token_projector\.|embedding\."
    ),
    "moozy": NetworkFamily(
        _moozy, f"{_MOOZY}.cls_token", rf".*\.mask_token|.*\.\d+\.pos_bias\.|(?!{_MOOZY}|{_CASE})"
    ),
    "titan": NetworkFamily(_titan, "attn_pool_contrastive.query", r"attn_pool\.|proj$"),
    "longnet": NetworkFamily(
        _longnet,
        "encoder.layers.0.self_attn.q_proj.weight",
        r"encoder\.layer_norm\.|decoder|mask_token|pos_embed",
    ),
    "perceiver": NetworkFamily(
        _perceiver,
        "perceiver.latents",
        r"img_norm\.|perceiver\.layers\.(\d{2,}|[2-9]\.xattn|[1-9]\.tf)\.",
    ),
}
