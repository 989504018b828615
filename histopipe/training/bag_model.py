"""Models of bags (multiple-instance learning): outputs and patch attention from the features of a bag.

Source:
    M. Ilse, J. M. Tomczak and M. Welling, "Attention-based Deep Multiple Instance Learning" (2018): attention as in its
    equation 8, gated as in equation 9; mean and max pooling as its baselines.
    M. Y. Lu et al., "Data-efficient and weakly supervised computational pathology on whole-slide images" (2021): CLAM,
    which is gated attention with classifiers of single patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from histopipe.dataset.transforms import hash31
from histopipe.runs.config import Precision
from histopipe.runs.task_config import BagPooling, BagTrainable
from histopipe.training.models import LOGITS, SampleDropout, dtype_policy
from histopipe.training.objective import Objective

HIDDEN, ATTENTION = 512, 256
"""Widths of CLAM's "small" model: hidden features of a patch, H, and attention."""
_QUERY = 128
"""Width of DSMIL's queries."""
_POINTS, _HEADS, _BLOCKS = 64, 8, 2
"""Induced points, attention heads and blocks of the transformer; TransMIL has 8 heads and 2 blocks, too."""
_PERIODS = tuple(2.0**power for power in range(2, 10))
"""Wavelengths of the positions: 4 to 512 patches."""


class PooledBags(NamedTuple):
    """The result of pooling (B, N, H) hidden features, all patches of a bag at once."""

    pooled: Any
    """(B, W), the input of the last layer; then, with `scores`, those of the best patches (B, C)."""
    shares: Any
    """(B, N, S) attention; the sum over the patches is 1."""
    values: Any
    """(B, N, V) features whose sum, weighted by each of the S `shares`, is pooled."""
    scores: Any = None
    """(B, N, C) scores of single patches. The outputs are the mean of the last layer and of the best scores."""


JointPooling = Callable[[Any, Any], PooledBags]
"""Pools (B, N, H) hidden features. Positions are (B, N, 2), in patches; None if the pooling has no use for them."""


def dual_stream(outputs: int, dtype: Any) -> JointPooling:
    """Return the pooling of DSMIL: the best patch of each output, and attention by the similarity to it.

    Source:
        B. Li, Y. Li and K. W. Eliceiri, "Dual-stream Multiple Instance Learning Network" (2021), equations 2 to 6.
    """
    instances = layers.Dense(outputs, dtype=dtype, name="instance_scores")
    query = layers.Dense(_QUERY, activation="tanh", name="query")

    def pool(hidden: Any, positions: Any) -> PooledBags:  # noqa: ARG001 - as all poolings
        scores = instances(hidden)
        queries = ops.cast(query(hidden), dtype)
        # Not `argmax`, whose operations ONNX does not have.
        best = ops.top_k(ops.transpose(scores, (0, 2, 1)), 1)[1]
        critical = ops.take_along_axis(queries, best, axis=1)
        near = ops.matmul(queries, ops.transpose(critical, (0, 2, 1))) / math.sqrt(_QUERY)
        shares = _shares(near)
        values = ops.cast(hidden, dtype)
        attended = ops.matmul(ops.transpose(shares, (0, 2, 1)), values)
        flat = ops.reshape(attended, (-1, outputs * HIDDEN))
        return PooledBags(
            ops.concatenate([flat, ops.max(scores, axis=1)], axis=1), shares, values, scores
        )

    return pool


def induced_attention(outputs: int, dtype: Any) -> JointPooling:  # noqa: ARG001 - as all poolings
    """Return self-attention between patches through 64 learned points, with sine waves of the positions.

    Work and memory grow with the number of patches, not with its square. The weights of the positions start at 0.

    Source:
        Z. Shao et al., "TransMIL" (2021): self-attention of patches with positions, in two layers; J. Lee et al., "Set
        Transformer" (2019): induced points, in place of TransMIL's approximation.
    """
    place = layers.Dense(HIDDEN, use_bias=False, kernel_initializer="zeros", name="positions_in")
    blocks = [
        (
            layers.LayerNormalization(name=f"norm_{number}"),
            layers.Dense(_POINTS, dtype=dtype, name=f"points_{number}"),
            layers.MultiHeadAttention(_HEADS, HIDDEN // _HEADS, name=f"attention_{number}"),
        )
        for number in range(1, _BLOCKS + 1)
    ]
    last_norm = layers.LayerNormalization(dtype=dtype, name="norm_last")
    score = layers.Dense(1, dtype=dtype, name="attention_score")

    def pool(hidden: Any, positions: Any) -> PooledBags:
        waves = [
            wave(positions * (2 * math.pi / p)) for p in _PERIODS for wave in (ops.sin, ops.cos)
        ]
        values = hidden + place(ops.concatenate(waves, axis=-1))
        for norm, toward, attend in blocks:
            inner = norm(values)
            shares = ops.cast(_shares(toward(inner)), inner.dtype)
            values = values + attend(inner, ops.matmul(ops.transpose(shares, (0, 2, 1)), inner))
        values = last_norm(values)
        shares = _shares(score(values))
        return PooledBags(ops.sum(shares * values, axis=1), shares, values)

    return pool


_PLAIN: Mapping[BagPooling, Callable[..., layers.Layer]] = {
    "mean": layers.GlobalAveragePooling1D,
    "max": layers.GlobalMaxPooling1D,
    "none": layers.GlobalAveragePooling1D,
}
"""Poolings without attention."""
JOINT: Mapping[BagPooling, Callable[[int, Any], JointPooling]] = {
    "dsmil": dual_stream,
    "transformer": induced_attention,
}
"""Poolings that need all patches of a bag in memory, by number of outputs and type of sums and probabilities."""
WITH_POSITIONS: tuple[BagPooling, ...] = ("transformer",)
"""Poolings that take the positions of the patches."""


def _shares(scores: Any) -> Any:
    """Return the softmax of (B, N, S) scores over the patches, without Keras' warning for bags of one patch."""
    return ops.exp(scores - ops.logsumexp(scores, axis=1, keepdims=True))


def feature_dimension(model: keras.Model) -> int:
    """Return the number of features per patch that a saved model takes."""
    inputs = model.input
    return int((inputs["features"] if isinstance(inputs, dict) else inputs).shape[-1])


HEADS = (LOGITS, "instances", "instance_scores")
"""Layers whose outputs are those of the task."""
_COVARIATE_RATE = 10.0
"""Factor of the learning rate for coefficients of covariates. The 512 coefficients of pooled features change together."""
_LIMIT = 10.0
"""Largest standardised feature: features that are 0 in almost all patches reach hundreds of deviations in others."""


class Patches(NamedTuple):
    """The patches of a bag."""

    features: tf.Tensor
    """(N, D) of any float type."""
    positions: tf.Tensor | None = None
    """(N, 2) float32 top left corners in units of the patch side, for models with `takes_positions`."""


class BagModel:
    """A model of bags.

    `serving` is the model saved in `model.keras`: features (B, N, D) float32 to {"probability": (B, C)}, or the name of
    the objective's outputs, and, with attention, {"attention": (B, N)}. With covariates or positions, it takes
    {"features": …, "covariates": (B, K), "positions": (B, N, 2)}. It has only stock layers. Training updates its weights.
    `attention` is the width of gated and plain attention; `trainable` as in `BagTrainConfig`.
    With `scaled` it standardises features by `scaling`, a layer whose weights training does not change. `rate_factors`
    are the factors of the learning rate for each trained weight: numbers, or arrays of their rows.

    Raises:
        UsageError: the pooling does not apply to the objective.
    """

    def __init__(
        self,
        pooling: BagPooling,
        *,
        dimension: int,
        objective: Objective,
        dropout: float,
        covariates: int = 0,
        precision: Precision = "float32",
        scaled: bool = False,
        attention: int = ATTENTION,
        trainable: BagTrainable = "all",
    ) -> None:
        self.pooling: BagPooling = pooling
        self.batch_norms: list[layers.BatchNormalization] = []
        self.takes_positions = pooling in WITH_POSITIONS
        self.width = dimension if pooling == "none" else HIDDEN
        """Hidden features of a patch; without a hidden layer those of the encoder."""
        self._attention = attention
        self.has_instances = pooling == "clam"
        """Whether single patches have a loss, see `instances`."""
        self.outputs = objective.outputs
        self.scaling: layers.BatchNormalization | None = None
        with dtype_policy(precision):
            # Sums and probabilities need more than 16 bits.
            self.sum_dtype = keras.config.dtype_policy().variable_dtype
            if scaled:
                # Features can exceed the range of float16 before this layer. An epsilon would shrink small features.
                self.scaling = layers.BatchNormalization(
                    center=False,
                    epsilon=0.0,
                    trainable=False,
                    name="scaling",
                    dtype=self.sum_dtype,
                )
            self._build(dimension, objective, dropout, covariates)
        for layer in self.training.layers:
            if (trainable == "head" and layer.name not in HEADS) or (
                trainable == "pooling" and layer is self._hidden
            ):
                layer.trainable = False
        self.last_weights: list[keras.Variable] = self._logits.trainable_variables
        """Weights used by `logits`: kernel, whose rows are pooled features and then covariates, and bias."""
        kernel, weights = self.last_weights[0], self.training.trainable_variables
        last = set(map(id, self.last_weights))
        self.patch_weights = [weight for weight in weights if id(weight) not in last]
        """Weights used by `patches`, `together` and `instances`."""
        rates = np.ones((kernel.shape[0], 1))
        rates[len(rates) - covariates :] = _COVARIATE_RATE
        self.rate_factors = [rates if weight is kernel else 1.0 for weight in weights]
        if objective.bias is not None:
            self._logits.bias.assign(objective.bias)

    @property
    def uses_features(self) -> bool:
        """Whether the features have a part in the predictions: at the start with covariates, they have none."""
        return bool(np.any(self.last_weights[0].numpy()[: self.width]))

    def _build(self, dimension: int, objective: Objective, dropout: float, covariates: int) -> None:
        self._drop, last = SampleDropout(dropout), self.sum_dtype
        inputs = {"features": keras.Input((None, dimension), name="features")}
        if covariates:
            inputs["covariates"] = keras.Input((covariates,), name="covariates")
        if self.takes_positions:
            inputs["positions"] = keras.Input((None, 2), name="positions")
        self._hidden = (
            layers.Activation("linear", name="hidden")
            if self.pooling == "none"
            else layers.Dense(HIDDEN, activation="relu", name="hidden")
        )
        hidden = layers.Dropout(dropout)(self._hidden(self._scaled(inputs["features"])))
        self._score: Any = None
        self.last_layer_share = 1.0
        """Share of the last layer in the outputs; the rest is that of the scores of single patches."""
        pooled, outputs = self._pool(hidden, inputs.get("positions"), last)
        self._logits = layers.Dense(objective.outputs, dtype=last, name=LOGITS)
        logits = self._last_layer(pooled, inputs.get("covariates"))
        outputs[objective.name] = objective.layer(last)(logits)
        plain = inputs if len(inputs) > 1 else inputs["features"]
        self.serving = self.training = keras.Model(plain, outputs, name=f"mil_{self.pooling}")
        if self.has_instances:
            self._instances = layers.Dense(2 * self.outputs, dtype=last, name="instances")
            self.training = keras.Model(
                plain, {**outputs, "instances": self._instances(hidden)}, name="training"
            )

    def _pool(self, hidden: Any, positions: Any, last: Any) -> tuple[Any, dict[str, Any]]:
        """Return symbolic pooled features, and {"attention": …} if the pooling has one."""
        if self.pooling in _PLAIN:
            return _PLAIN[self.pooling](dtype=last)(hidden), {}
        if self.pooling in JOINT:
            self._joint = JOINT[self.pooling](self.outputs, last)
            joint = self._joint(hidden, positions)
            self.last_layer_share = 1.0 if joint.scores is None else 0.5
            return joint.pooled, {"attention": ops.mean(joint.shares, axis=-1)}
        self._tanh = layers.Dense(self._attention, activation="tanh", name="attention_tanh")
        self._gate = None
        inner = self._tanh(hidden)
        if self.pooling != "attention":
            self._gate = layers.Dense(self._attention, activation="sigmoid", name="attention_gate")
            inner = layers.Multiply()([inner, self._gate(hidden)])
        self._score = layers.Dense(1, dtype=last, name="attention_score")
        shares = layers.Softmax(axis=1, dtype=last)(self._score(inner))
        pooled = layers.Flatten(dtype=last)(layers.Dot(axes=1, dtype=last)([shares, hidden]))
        return pooled, {"attention": layers.Reshape((-1,), dtype=last, name="attention")(shares)}

    def _last_layer(self, pooled: Any, covariates: Any) -> Any:
        """Return (B, C) logits from (B, W) pooled features and (B, K) covariates."""
        best = None
        if self.last_layer_share < 1:
            pooled, best = pooled[:, : -self.outputs], pooled[:, -self.outputs :]
        if covariates is not None:
            pooled = layers.Concatenate(dtype=self.sum_dtype)([pooled, covariates])
        logits = self._logits(pooled)
        return logits if best is None else layers.Average(dtype=self.sum_dtype)([logits, best])

    def patches(
        self,
        weights: Sequence[tf.Tensor],
        features: tf.Tensor,
        rows: tf.Tensor,
        seed: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return hidden features (n, H) and attention scores (n,) of patches; scores are 0 without attention.

        Weights are values of `patch_weights`; features (n, D) of any float type; rows (n,) int64 are positions in the
        bag. `seed` () int64 is that of the bag in this epoch; None outside of training.
        """
        with self._using(weights):
            hidden = self._dropped(features, rows, seed)
            scores = tf.zeros(tf.shape(hidden)[:1], self.sum_dtype)
            if self._score is not None:
                inner = self._tanh(hidden)
                if self._gate is not None:
                    inner *= self._gate(hidden)
                scores = self._score(inner)[:, 0]
        return tf.cast(hidden, self.sum_dtype), scores

    def together(
        self, weights: Sequence[tf.Tensor], patches: Patches, seed: tf.Tensor | None
    ) -> PooledBags:
        """Pool all patches of a bag by one of the `JOINT` poolings, with B = 1. Weights and seed as for `patches`."""
        rows = tf.range(tf.shape(patches.features, tf.int64)[0])
        positions = None if patches.positions is None else patches.positions[None]
        with self._using(weights):
            return self._joint(self._dropped(patches.features, rows, seed)[None], positions)

    def instances(self, weights: Sequence[tf.Tensor], hidden: tf.Tensor) -> tf.Tensor:
        """Return (n, C, 2) logits of CLAM's classifiers of single patches, from (n, H) hidden features."""
        with self._using(weights):
            return tf.reshape(self._instances(hidden), (-1, self.outputs, 2))

    def logits(
        self,
        weights: Sequence[tf.Tensor],
        pooled: tf.Tensor,
        covariates: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Return (1, C) logits from values of `last_weights`, the pooled features of a bag, and (1, K) covariates."""
        with keras.StatelessScope(zip(self.last_weights, weights, strict=True)):
            return self._last_layer(pooled[None], covariates)

    def _using(self, weights: Sequence[tf.Tensor]) -> Any:
        return keras.StatelessScope(zip(self.patch_weights, weights, strict=True))

    def _scaled(self, features: Any) -> Any:
        """Return (B, N, D) features, standardised if the model does that."""
        scaling = self.scaling
        return features if scaling is None else ops.clip(scaling(features), -_LIMIT, _LIMIT)

    def _dropped(self, features: tf.Tensor, rows: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """Return the hidden features after dropout."""
        hidden = self._hidden(self._scaled(features[None])[0])
        if seed is None:
            return hidden
        return self._drop(hidden, hash31(hash31(rows, 5) ^ seed, 6), training=True)
