"""Attention-based multiple-instance learning: class probabilities and patch attention from a bag of features.

Source:
    M. Ilse, J. M. Tomczak and M. Welling, "Attention-based Deep Multiple Instance Learning" (2018): attention as in its
    equation 8, gated as in equation 9; mean and max pooling as its baselines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

from histopipe.dataset.augmentation import hash31
from histopipe.runs.config import Precision
from histopipe.runs.task_config import Pooling
from histopipe.training.models import LOGITS, SampleDropout, dtype_policy
from histopipe.training.objective import Objective

_HIDDEN, _ATTENTION = 512, 256
"""Widths of CLAM's "small" model."""


class BagModel:
    """A model of bags.

    `serving` is the model saved in `model.keras`: features (B, N, D) float32 to {"probability": (B, C)}, or the name of
    the objective's outputs, and, with attention, {"attention": (B, N)}. With covariates, it takes {"features": …,
    "covariates": (B, K)}. It has only stock layers. Training updates its weights.
    """

    def __init__(
        self,
        pooling: Pooling,
        *,
        dimension: int,
        objective: Objective,
        dropout: float,
        covariates: int = 0,
        precision: Precision = "float32",
    ) -> None:
        with dtype_policy(precision):
            self._build(pooling, dimension, objective, dropout, covariates)
        self.pooling: Pooling = pooling
        self.batch_norms: list[keras.layers.BatchNormalization] = []
        self.hidden_width = _HIDDEN

    def _build(
        self,
        pooling: Pooling,
        dimension: int,
        objective: Objective,
        dropout: float,
        covariates: int,
    ) -> None:
        # Sums and probabilities need more than 16 bits.
        self.sum_dtype = last = keras.config.dtype_policy().variable_dtype
        layers, self._drop = keras.layers, SampleDropout(dropout)
        features = keras.Input((None, dimension), name="features")
        self._hidden = layers.Dense(_HIDDEN, activation="relu", name="hidden")
        hidden = layers.Dropout(dropout)(self._hidden(features))
        self._score, outputs = None, {}
        if pooling in ("attention", "gated"):
            self._tanh = layers.Dense(_ATTENTION, activation="tanh", name="attention_tanh")
            self._gate = None
            inner = self._tanh(hidden)
            if pooling == "gated":
                self._gate = layers.Dense(_ATTENTION, activation="sigmoid", name="attention_gate")
                inner = layers.Multiply()([inner, self._gate(hidden)])
            self._score = layers.Dense(1, dtype=last, name="attention_score")
            shares = layers.Softmax(axis=1, dtype=last)(self._score(inner))
            pooled = layers.Flatten(dtype=last)(layers.Dot(axes=1, dtype=last)([shares, hidden]))
            outputs["attention"] = layers.Reshape((-1,), dtype=last, name="attention")(shares)
        elif pooling == "mean":
            pooled = layers.GlobalAveragePooling1D(dtype=last)(hidden)
        else:
            pooled = layers.GlobalMaxPooling1D(dtype=last)(hidden)
        self._logits = layers.Dense(objective.outputs, dtype=last, name=LOGITS)
        inputs = features
        if covariates:
            clinical = keras.Input((covariates,), name="covariates")
            pooled = layers.Concatenate(dtype=last)([pooled, clinical])
            inputs = {"features": features, "covariates": clinical}
        outputs[objective.name] = objective.layer(last)(self._logits(pooled))
        self.serving = self.training = keras.Model(inputs, outputs, name=f"mil_{pooling}")

    def save(self, path: Path) -> None:
        """Save the serving model, for any backend of Keras."""
        self.serving.save(path)

    @property
    def patch_weights(self) -> list[keras.Variable]:
        """Weights used by `patches`."""
        last = {id(weight) for weight in self.last_weights}
        return [w for w in self.training.trainable_variables if id(w) not in last]

    @property
    def last_weights(self) -> list[keras.Variable]:
        """Weights used by `logits`."""
        weights: list[keras.Variable] = self._logits.trainable_variables
        return weights

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
        with keras.StatelessScope(zip(self.patch_weights, weights, strict=True)):
            hidden = self._hidden(features)
            if seed is not None:
                seeds = hash31(hash31(rows, 5) ^ seed, 6)
                hidden = self._drop(hidden, seeds, training=True)
            if self._score is None:
                scores = tf.zeros(tf.shape(hidden)[:1], self.sum_dtype)
            else:
                inner = self._tanh(hidden)
                if self._gate is not None:
                    inner *= self._gate(hidden)
                scores = self._score(inner)[:, 0]
        return tf.cast(hidden, self.sum_dtype), scores

    def logits(
        self,
        weights: Sequence[tf.Tensor],
        pooled: tf.Tensor,
        covariates: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Return (1, C) logits from values of `last_weights`, the (H,) pooled features of a bag, and (1, K) covariates."""
        if covariates is not None:
            pooled = tf.concat([pooled, tf.cast(covariates[0], pooled.dtype)], axis=0)
        with keras.StatelessScope(zip(self.last_weights, weights, strict=True)):
            logits: tf.Tensor = self._logits(pooled[None])
        return logits
