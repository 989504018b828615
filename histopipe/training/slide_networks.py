"""Slide encoders: networks from the features of all patches of a slide to one vector.

Each family is one function, which asks for its weights by their published names, so that it also describes the file. Memory
grows with the number of patches, not with its square: attention is computed for blocks of queries, and position biases
for the same blocks. Gradients compute each block again.

Source:
    Lu et al. 2021 (CLAM), Shao et al. 2025 (FEATHER), Wang et al. 2024 (CHIEF), Jaume et al. 2024 (Madeleine): gated attention.
    Ding et al. 2024 (TITAN), and MOOZY (2026): transformers with a bias by distance, ALiBi of Press et al. 2022.
    Xu et al. 2024 (Prov-GigaPath), Ding et al. 2023 (LongNet): dilated attention.
    Shaikovski et al. 2024 (PRISM): Perceiver of Jaegle et al. 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import DamagedStore, UsageError
from histopipe.pretrained.checkpoints import Tensor
from histopipe.pretrained.slide_encoders import SlideArchitecture
from histopipe.system.output import counted

BLOCK = 1 << 25
"""Attention scores computed at once: 128 MB in float32."""
_ROWS = 1 << 14
"""Patches of which the widest layer is computed at once."""
_NOTHING = -1e8
"""Logarithm of the weight of a token in a part of LongNet's attention that does not contain it."""
_OFF_GRID = 0.25
"""Largest distance of a patch from its place in the grid, in patches."""


class SlidePatches(NamedTuple):
    """Features and places of the patches of a slide."""

    features: Any
    """(N, D) features of any float type."""
    corners: NDArray[np.float64] | None = None
    """(N, 2) top left corners in level-0 pixels."""
    side: float = 0.0
    """Side of the patches in level-0 pixels."""

    def grid(self) -> NDArray[np.float64]:
        """Return (N, 2) columns and rows of the patches in their grid.

        Raises:
            UsageError: there are no places, or the patches overlap or are of no grid.
        """
        problem = "no coords, or no side of the patches"
        if self.corners is not None and self.side > 0:
            exact = (self.corners - self.corners.min(axis=0)) / self.side
            cells = np.round(exact)
            apart = np.abs(exact - cells).max()
            same = len(cells) - len(np.unique(cells, axis=0))
            problem = f"{counted(same, 'patch', 'patches')} in the place of another" if same else ""
            if not same and apart > _OFF_GRID:
                problem = f"patches {apart:.2g} of their side away from a common grid"
            if not problem:
                return np.asarray(cells, np.float64)
        raise UsageError(
            "the slide encoder needs positions",
            found=problem,
            expected="patches of one grid without overlap",
            todo="tile the slides without --overlap, or choose another slide encoder",
        )


class SlideVector(NamedTuple):
    """The output of a slide encoder."""

    value: Any
    """(W,) float32."""
    attention: Any = None
    """(N,) attention of each patch with a sum of 1; None if the network has none."""


class Weights:
    """Weights of a network by their published names. `shapes` are those that were asked for.

    Without `tensors`, all are 0. `names` are those of the file, for `has`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | None = None,
        names: Collection[str] = (),
        dtype: Any = tf.float32,
    ) -> None:
        self.tensors, self._names, self.dtype = tensors, tensors or names, dtype
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __call__(self, name: str, *shape: int) -> Any:
        """Return a weight."""
        self.shapes[name] = shape
        return tf.zeros(shape) if self.tensors is None else self.tensors[name]

    def has(self, name: str) -> bool:
        """Return whether the file has a weight that only some versions of a network have."""
        return name in self._names

    def linear(self, x: Any, name: str, width: int, *, bias: bool = True) -> Any:
        """Return (..., width) of a linear layer, in the precision of the network."""
        kernel = tf.cast(self(f"{name}.weight", width, x.shape[-1]), self.dtype)
        y = tf.matmul(tf.cast(x, self.dtype), kernel, transpose_b=True)
        return y + tf.cast(self(f"{name}.bias", width), self.dtype) if bias else y

    def norm(self, x: Any, name: str, epsilon: float = 1e-5) -> Any:
        """Return a layer normalization in float32."""
        x = tf.cast(x, tf.float32)
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        scale, offset = (self(f"{name}.{part}", x.shape[-1]) for part in ("weight", "bias"))
        return (x - mean) * tf.math.rsqrt(variance + epsilon) * scale + offset


def attend(
    q: Any, k: Any, v: Any, bias: Callable[[slice, slice], Any] | None = None
) -> tuple[Any, Any]:
    """Attend in blocks: exact, without an array of all pairs.

    Args:
        q, k, v: (B, Q, D), (B, K, D) and (B, K, E); an item of B is a head, or a segment of one.
        bias: of the scores of a slice of queries and a slice of items, (items, queries, K).

    Returns:
        (B, Q, E), and the logarithm of the sum of the exponentials of the scores (B, Q) float32.
    """
    items, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    rows = max(1, min(queries, BLOCK // keys))
    batch = max(1, min(items, BLOCK // (rows * keys)))

    def block(q: Any, k: Any, v: Any, extra: Any) -> tuple[Any, Any]:
        scores = tf.cast(tf.matmul(q, k, transpose_b=True), tf.float32) / math.sqrt(q.shape[-1])
        norm = tf.reduce_logsumexp(scores + extra, axis=-1)
        shares = tf.exp(scores + extra - norm[..., None])
        return tf.matmul(tf.cast(shares, v.dtype), v), norm

    if rows < queries or batch < items:
        block = _recomputed(block)
    results = []
    for begin in range(0, queries, rows):
        at, parts = slice(begin, min(begin + rows, queries)), []
        for first in range(0, items, batch):
            some = slice(first, min(first + batch, items))
            extra = tf.zeros((1, 1, 1)) if bias is None else bias(at, some)
            parts.append(block(q[some, at], k[some], v[some], extra))
        results.append([tf.concat(part, 0) for part in zip(*parts, strict=True)])
    value, norm = (tf.concat(part, 1) for part in zip(*results, strict=True))
    return value, norm


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose activations are computed again for gradients, instead of kept."""
    return tf.recompute_grad(function) if tf.executing_eagerly() else function


def _heads(x: Any, heads: int) -> Any:
    """Return (H, T, D / H) for (T, D)."""
    return tf.transpose(tf.reshape(x, (x.shape[0], heads, x.shape[1] // heads)), (1, 0, 2))


def _joined(x: Any) -> Any:
    """Return (T, D) for (H, T, D / H)."""
    return tf.reshape(tf.transpose(x, (1, 0, 2)), (x.shape[1], x.shape[0] * x.shape[2]))


def _in_rows(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to the rows of (T, D), some at once: its inner layer may be several times as wide."""
    if x.shape[0] <= _ROWS:
        return function(x)
    parts = (x[begin : begin + _ROWS] for begin in range(0, x.shape[0], _ROWS))
    return tf.concat([_recomputed(function)(part) for part in parts], 0)


def _gelu(x: Any) -> Any:
    return tf.nn.gelu(x, approximate=False)


def _share(attention: Any, first: int = 0) -> Any:
    """Return the (N,) mean attention of the patches, after `first` other tokens, of (H, T)."""
    patches = tf.reduce_mean(tf.cast(attention, tf.float32), axis=0)[first:]
    return patches / tf.reduce_sum(patches)


def _gated(
    network: SlideArchitecture, w: Weights, patches: SlidePatches, first: str, attention: str
) -> SlideVector:
    hidden = tf.nn.relu(w.linear(patches.features, first, network.width))
    scores = _gated_scores(network, w, hidden, attention)
    shares = tf.nn.softmax(scores, axis=0)
    # CHIEF returns the mean of its inputs.
    values = patches.features if network.pooling == "inputs" else hidden
    return SlideVector(tf.linalg.matvec(tf.cast(values, tf.float32), shares[:, 0], True), shares[:, 0])


def _gated_scores(network: SlideArchitecture, w: Weights, hidden: Any, name: str) -> Any:
    """Return (N, 1) float32 scores of gated attention."""
    tanh = tf.tanh(w.linear(hidden, f"{name}.attention_a.0", network.hidden))
    gate = tf.sigmoid(w.linear(hidden, f"{name}.attention_b.0", network.hidden))
    return tf.cast(w.linear(tanh * gate, f"{name}.attention_c", 1), tf.float32)


def _madeleine(network: SlideArchitecture, w: Weights, patches: SlidePatches) -> SlideVector:
    x, width, heads = patches.features, network.width, network.heads
    for number, outputs in zip((0, 4, 8), (width, width, width * heads), strict=True):
        name = f"wsi_embedders.pre_attn.{number}"
        x = w.linear(x, name, outputs)
        x = _gelu(w.norm(x, f"wsi_embedders.pre_attn.{number + 1}"))
    x = tf.reshape(x, (x.shape[0], width, heads))  # the heads of a feature are neighbours
    shares = [
        tf.nn.softmax(_gated_scores(network, w, x[:, :, head], f"wsi_embedders.attn.{head}"), axis=0)
        for head in range(heads)
    ]
    pooled = tf.einsum("nwh,nh->wh", x, tf.concat(shares, 1))
    value = w.linear(tf.reshape(pooled, (1, width * heads)), "projector", width)
    return SlideVector(tf.cast(value[0], tf.float32), _share(tf.transpose(tf.concat(shares, 1))))


class _Distances:
    """Bias of attention: minus the distance of two patches times the slope of the head; 0 for other tokens, which come first."""

    def __init__(self, cells: NDArray[np.float64], prefix: int, slopes: Any) -> None:
        places = np.concatenate([np.zeros((prefix, 2)), cells]).astype(np.float32)
        self._x, self._y = (tf.constant(places[:, axis]) for axis in (0, 1))
        self._is_patch = tf.constant((np.arange(len(places)) >= prefix).astype(np.float32))
        self._slopes = tf.reshape(slopes, (-1, 1, 1))
        self._last: tuple[slice, Any] = slice(0), None

    def __call__(self, at: slice, heads: slice) -> Any:
        if self._last[0] != at:  # the same for all heads
            far = [(axis[at, None] - axis[None]) ** 2 for axis in (self._x, self._y)]
            both = self._is_patch[at, None] * self._is_patch[None]
            self._last = at, tf.sqrt(far[0] + far[1]) * both
        return self._slopes[heads] * self._last[1]


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head; between powers of 2 every other one of the next power."""
    power = 1 << int(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + [2.0 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]


def _blocks(names: str, depth: int, *parts: Callable[[Any, str], Any]) -> list[Callable[[Any], Any]]:
    """Return the residual parts of all blocks, whose names are `names` with a number."""
    return [partial(part, name=names.format(n)) for n in range(depth) for part in parts]


def _transformer(x: Any, layers: Sequence[Callable[[Any], Any]]) -> Any:
    """Apply the residual parts of a transformer, of which each computes its activations again for gradients."""
    for layer in layers:
        x = x + tf.cast(_recomputed(layer)(x), tf.float32)
    return x


def _mlp(w: Weights, x: Any, name: str, names: tuple[str, str], width: int) -> Any:
    hidden = _gelu(w.linear(x, f"{name}.{names[0]}", width))
    return w.linear(hidden, f"{name}.{names[1]}", x.shape[-1])


def _moozy_layers(
    network: SlideArchitecture, w: Weights, prefix: str, depth: int, bias: Any
) -> list[Callable[[Any], Any]]:
    """Return the residual parts of MOOZY's transformers, of patches and of slides."""

    def scaled(x: Any, name: str) -> Any:
        return x * tf.cast(w(name, network.width), x.dtype) if w.has(name) else x

    def attention(x: Any, name: str) -> Any:
        x = w.norm(x, f"{name}.norm1")
        q, k, v = (_heads(w.linear(x, f"{name}.{p}_proj", network.width), network.heads) for p in "qkv")
        if w.has(f"{name}.q_norm.weight"):
            q, k = (tf.cast(w.norm(y, f"{name}.{p}_norm"), w.dtype) for y, p in ((q, "q"), (k, "k")))
        x = w.linear(_joined(attend(q, k, v, bias)[0]), f"{name}.out_proj", network.width)
        return scaled(x, f"{name}.ls_attn.gamma")

    def mlp(x: Any, name: str) -> Any:
        x = _in_rows(lambda rows: _mlp(w, w.norm(rows, f"{name}.norm2"), name, ("fc1", "fc2"), network.hidden), x)
        return scaled(x, f"{name}.ls_mlp.gamma")

    return _blocks(f"{prefix}.blocks.{{}}", depth, attention, mlp)


_MOOZY, _CASE = "teacher_slide_encoder", "case_transformer"


def _moozy(network: SlideArchitecture, w: Weights, patches: SlidePatches) -> SlideVector:
    width, name = network.width, _MOOZY
    x = _gelu(w.linear(patches.features, f"{name}.input_proj.0", width))
    tokens = [w(f"{name}.cls_token", 1, 1, width)[0], w(f"{name}.register_tokens", 1, 4, width)[0]]
    x = tf.concat([*tokens, tf.cast(x, tf.float32)], 0)
    bias = _Distances(patches.grid(), 5, w(f"{name}.pos_bias.slopes", network.heads, 1))
    x = _transformer(x, _moozy_layers(network, w, name, network.depth, bias))
    return SlideVector(w.norm(x[:1], f"{name}.norm")[0])


def _moozy_patient(network: SlideArchitecture, w: Weights, slides: Any) -> Any:
    """Return the (W,) vector of a patient from (S, W) vectors of slides."""
    x = tf.concat([w(f"{_CASE}.case_token", 1, 1, network.width)[0], slides], 0)
    x = _transformer(x, _moozy_layers(network, w, _CASE, network.patient_depth, None))
    return w.norm(x[:1], f"{_CASE}.norm")[0]


def _titan(network: SlideArchitecture, w: Weights, patches: SlidePatches) -> SlideVector:
    width, heads, epsilon = network.width, network.heads, 1e-6
    x = _gelu(w.linear(patches.features, "patch_embed.0", width))
    x = tf.concat([w("cls_token", 1, 1, width)[0], tf.cast(x, tf.float32)], 0)
    bias = _Distances(patches.grid(), 1, -tf.constant(alibi_slopes(heads)))

    def attention(x: Any, name: str) -> Any:
        qkv = w.linear(w.norm(x, f"{name}.norm1", epsilon), f"{name}.attn.qkv", 3 * width)
        q, k, v = (_heads(part, heads) for part in tf.split(qkv, 3, axis=1))
        return w.linear(_joined(attend(q, k, v, bias)[0]), f"{name}.attn.proj", width)

    def mlp(x: Any, name: str) -> Any:
        return _in_rows(
            lambda rows: _mlp(
                w, w.norm(rows, f"{name}.norm2", epsilon), f"{name}.mlp", ("fc1", "fc2"), network.hidden
            ),
            x,
        )

    layers = _blocks("blocks.modules_list.{}", network.depth, attention, mlp)
    x = w.norm(_transformer(x, layers), "norm", epsilon)
    name, pool_heads = "attn_pool_contrastive", 8
    q = w.norm(w(f"{name}.query", 1, width), f"{name}.ln_q")
    value, shares = _packed_attention(w, f"{name}.attn", q, w.norm(x, f"{name}.ln_k"), pool_heads)
    return SlideVector(tf.cast(value[0], tf.float32), _share(shares, 1))


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
    q, k, v = (_heads(y, heads) for y in (q, k, v))
    value, norm = attend(q, k, v)
    scores = tf.cast(tf.einsum("hd,htd->ht", q[:, 0], k), tf.float32) / math.sqrt(q.shape[-1])
    joined = w.linear(_joined(value), f"{name}.out_proj", width, bias=bias)
    return joined, tf.exp(scores - norm[:, :1])


def _dilated(q: Any, k: Any, v: Any, segments: Sequence[int], ratios: Sequence[int]) -> Any:
    """Return dilated attention of (H, T, D): in segments, of every r-th token, which differs by head.

    As in the published network, places after the last token are tokens of zeros.
    """
    heads, count, size = q.shape
    values, norms = [], []
    for length, ratio in zip(segments, ratios, strict=True):
        length = min(length, count)
        number, inner = -(-count // length), -(-length // ratio)

        def sparse(x: Any) -> Any:
            x = tf.pad(x, [[0, 0], [0, number * length - count], [0, 0]])
            x = tf.pad(
                tf.reshape(x, (heads, number, length, size)),
                [[0, 0], [0, 0], [0, inner * ratio - length], [0, 0]],
            )
            x = tf.reshape(x, (ratio, heads // ratio, number, inner, ratio, size))
            return tf.concat([x[g, :, :, :, g] for g in range(ratio)], 0)

        def dense(x: Any, filled: float) -> Any:
            size = x.shape[-1]
            x = tf.reshape(x, (heads, number, inner, 1, size))
            group = tf.reshape(tf.range(heads) // (heads // ratio), (heads, 1, 1, 1, 1))
            here = tf.equal(tf.reshape(tf.range(ratio), (1, 1, 1, ratio, 1)), group)
            x = tf.reshape(tf.where(here, x, filled), (heads, number, inner * ratio, size))
            return tf.reshape(x[:, :, :length], (heads, number * length, size))[:, :count]

        parts = (tf.reshape(sparse(x), (heads * number, inner, size)) for x in (q, k, v))
        value, norm = attend(*parts)
        values.append(dense(value, 0.0))
        norms.append(dense(norm[..., None], _NOTHING))
    shares = tf.nn.softmax(tf.stop_gradient(tf.stack(norms)), axis=0)
    return tf.add_n([value * tf.cast(share, value.dtype) for value, share in zip(values, tf.unstack(shares), strict=True)])


def _sine_positions(places: NDArray[np.float64], width: int) -> NDArray[np.float32]:
    """Return (N, width) sine and cosine waves of (N, 2) columns and rows: half of the features of each."""
    rates = 1.0 / 10000 ** (np.arange(width // 4) / (width / 4))
    # The published table has the rows first.
    angles = [np.floor(places[:, axis])[:, None] * rates for axis in (1, 0)]
    return np.concatenate([wave(a) for a in angles for wave in (np.sin, np.cos)], 1).astype(np.float32)


def _longnet(network: SlideArchitecture, w: Weights, patches: SlidePatches) -> SlideVector:
    width, heads = network.width, network.heads
    patches.grid()  # raises
    x = tf.cast(w.linear(patches.features, "patch_embed.proj", width), tf.float32)
    x = x + _sine_positions(patches.corners / patches.side, width)
    x = tf.concat([w("cls_token", 1, 1, width)[0], x], 0)

    def attention(x: Any, name: str) -> Any:
        x = w.norm(x, f"{name}.self_attn_layer_norm")
        q, k, v = (_heads(w.linear(x, f"{name}.self_attn.{p}_proj", width), heads) for p in "qkv")
        x = w.norm(_joined(_dilated(q, k, v, network.segments, network.ratios)), f"{name}.self_attn.inner_attn_ln")
        return w.linear(x, f"{name}.self_attn.out_proj", width)

    def rows(x: Any, name: str) -> Any:
        x = w.norm(x, f"{name}.final_layer_norm")
        x = _gelu(tf.cast(w.linear(x, f"{name}.ffn.fc1", network.hidden), tf.float32))
        return w.linear(w.norm(x, f"{name}.ffn.ffn_layernorm"), f"{name}.ffn.fc2", width)

    def mlp(x: Any, name: str) -> Any:
        return _in_rows(partial(rows, name=name), x)

    x = _transformer(x, _blocks("encoder.layers.{}", network.depth, attention, mlp))
    x = x[:1] if network.pooling == "class" else tf.reduce_mean(x[1:], axis=0, keepdims=True)
    return SlideVector(w.norm(x, "norm", 1e-6)[0])


def _perceiver(network: SlideArchitecture, w: Weights, patches: SlidePatches) -> SlideVector:
    """Only the first two cross attentions, and the first transformer, have weights of their own."""
    width, name = network.width, "perceiver.layers"

    def feed_forward(x: Any, name: str) -> Any:
        inner = w.linear(w.norm(x, f"{name}.norm"), f"{name}.net.0", 2 * network.hidden)
        inner, gates = tf.split(inner, 2, axis=-1)
        return w.linear(inner * _gelu(gates), f"{name}.net.2", width)

    def transform(x: Any, name: str) -> Any:
        normed = w.norm(x, f"{name}.norm")
        return _packed_attention(w, f"{name}.mha", normed, normed, network.heads, bias=False)[0]

    x = w("perceiver.latents", network.latents, width)
    for layer in range(network.depth):
        cross = f"{name}.{min(layer, 1)}.xattn"
        if layer < 2:  # noqa: PLR2004 - the keys of the second are those of all later ones
            both = w.linear(patches.features, f"{cross}.xattn.to_kv", 2 * width, bias=False)
            k, v = (part[None] for part in tf.split(both, 2, axis=-1))
        normed = w.norm(x, f"{cross}.xattn.x_norm")
        q = w.linear(normed, f"{cross}.xattn.to_q", width, bias=False)[None]
        value, norm = attend(q, k, v)
        scores = tf.cast(tf.einsum("qd,td->qt", q[0, :1], k[0]), tf.float32) / math.sqrt(width)
        shares = tf.exp(scores - norm[:, :1])
        inner = [
            lambda _, value=value[0]: w.linear(value, f"{cross}.xattn.to_out", width, bias=False),
            partial(feed_forward, name=f"{cross}.ff"),
        ]
        for block in range(network.inner_depth):
            inner += [
                partial(transform, name=f"{name}.0.tf.{block}.mhsa"),
                partial(feed_forward, name=f"{name}.0.tf.{block}.ff"),
            ]
        x = _transformer(x, inner)
    return SlideVector(w.norm(x[:1], "cls_norm")[0], _share(shares))


class Family(NamedTuple):
    """A kind of network."""

    encode: Callable[[SlideArchitecture, Weights, SlidePatches], SlideVector]
    first: str
    """Name of a weight that each file has; what is before it is a prefix of all names."""
    unused: str
    """Pattern of the names of weights that are in files but not in the network."""


FAMILIES: Mapping[str, Family] = {
    "abmil": Family(partial(_gated, first="patch_embed.0", attention="global_attn"), "patch_embed.0.weight", r"classifier\."),
    "clam": Family(
        partial(_gated, first="attention_net.0", attention="attention_net.3"),
        "attention_net.0.weight",
        r"(instance_)?classifiers\.|att_head\.|text_to_vision\.|organ_embedding",
    ),
    "madeleine": Family(_madeleine, "wsi_embedders.pre_attn.0.weight", r"token_projector\.|embedding\."),
    "moozy": Family(
        _moozy, f"{_MOOZY}.cls_token", rf".*\.mask_token|.*\.\d+\.pos_bias\.|(?!{_MOOZY}|{_CASE})"
    ),
    "titan": Family(_titan, "attn_pool_contrastive.query", r"attn_pool\.|proj$"),
    "longnet": Family(
        _longnet, "encoder.layers.0.self_attn.q_proj.weight", r"encoder\.layer_norm\.|decoder|mask_token|pos_embed"
    ),
    "perceiver": Family(
        _perceiver, "perceiver.latents", r"img_norm\.|perceiver\.layers\.(\d{2,}|[2-9]\.xattn|[1-9]\.tf)\."
    ),
}


def expected_weights(
    network: SlideArchitecture, names: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each weight of a network, of which a file has some `names`. Nothing is computed."""
    weights = Weights(names=names)
    with tf.Graph().as_default():
        corners = np.array([[0.0, 0.0], [1.0, 0.0]])
        patches = SlidePatches(tf.zeros((2, network.features)), corners, 1.0)
        vector = FAMILIES[network.family].encode(network, weights, patches)
        if network.patient_depth:
            _moozy_patient(network, weights, vector.value[None])
    return weights.shapes


class SlideEncoder:
    """A slide encoder with its weights, on several devices.

    Args:
        network: the architecture.
        tensors: weights by name, as `expected_weights`.
        devices: names of the devices.
        precision: of linear layers; sums, norms and probabilities are float32.
    """

    def __init__(
        self,
        network: SlideArchitecture,
        tensors: Mapping[str, Tensor],
        devices: Sequence[str] = ("/CPU:0",),
        precision: str = "float32",
    ) -> None:
        self.network, self.devices = network, devices
        dtype = tf.bfloat16 if precision == "mixed_bfloat16" else tf.float32
        values = {name: tensor.read() for name, tensor in tensors.items()}
        self._weights: dict[str, Weights] = {}
        for device in devices:
            with tf.device(device):
                placed = {name: tf.constant(value) for name, value in values.items()}
                self._weights[device] = Weights(placed, dtype=dtype)

    def encode(
        self, patches: SlidePatches, device: str | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the (W,) vector of a slide, and the (N,) attention of its patches if the network has one.

        Raises:
            UsageError: the network needs positions that the slide does not have.
            DamagedStore: the vector is not finite.
        """
        device = device or self.devices[0]
        with tf.device(device):
            vector = self._vector(patches, device)
            attention = None if vector.attention is None else vector.attention.numpy()
            return _finite(vector.value.numpy()), attention

    def encode_patient(self, slides: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the (W,) vector of a patient from (S, W) vectors of slides: their mean if the network has no other way."""
        if not self.network.patient_depth or not len(slides):
            return np.asarray(slides.mean(axis=0), np.float32)
        with tf.device(self.devices[0]):
            weights = self._weights[self.devices[0]]
            return _finite(_moozy_patient(self.network, weights, tf.constant(slides)).numpy())

    def contributions(
        self, patches: SlidePatches, slopes: NDArray[np.floating]
    ) -> NDArray[np.float64]:
        """Return (N, C): gradient times input of each patch for C outputs with (C, W) slopes for the vector of the slide."""
        device = self.devices[0]
        with tf.device(device), tf.GradientTape(persistent=True) as tape:
            features = tf.constant(patches.features, tf.float32)
            tape.watch(features)
            vector = self._vector(patches._replace(features=features), device)
            outputs = [tf.reduce_sum(vector.value * slope) for slope in slopes.astype(np.float32)]
        parts = [tf.reduce_sum(tape.gradient(output, features) * features, 1) for output in outputs]
        return np.stack([part.numpy() for part in parts], axis=1).astype(np.float64)

    def _vector(self, patches: SlidePatches, device: str) -> SlideVector:
        features = tf.cast(tf.convert_to_tensor(patches.features), tf.float32)
        encode = FAMILIES[self.network.family].encode
        return encode(self.network, self._weights[device], patches._replace(features=features))


def _finite(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(vector).all():
        raise DamagedStore("the vector of the slide is not finite", todo="check features and weights")
    return vector
