"""Segmentation: networks with a decoder, and the loss and the counts of pixels."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import scipy  # loads its parts when they are used
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray

from histopipe.annotations.rules import NOT_ANNOTATED
from histopipe.errors import UsageError
from histopipe.runs.config import Precision
from histopipe.tasks.curves import BINS
from histopipe.training.backbones import Backbone, build_backbone
from histopipe.training.models import (
    LOGITS,
    PatchModel,
    SampleDropout,
    dtype_policy,
    rate_factors,
    set_trainable,
)
from histopipe.training.objective import BatchTensors, ClassObjective, Objective

_WIDTHS = (32, 64, 128)
"""Filters of the decoder, from the finest map on; coarser ones have as many as the last."""
_COARSEST = 4
"""Most pixels of a patch per pixel of the last map of a decoder."""
_PERCENTILE = 95


class SegmentationObjective(ClassObjective):
    """Probabilities of the class of each pixel, (B, H, W, K), by cross-entropy and soft Dice.

    The loss of a patch depends on its annotated pixels only: the mean of their cross-entropy, and 1 minus the mean Dice over
    the classes in its mask.

    Source:
        F. Isensee et al., nnU-Net, Nature Methods 18 (2021), which add both losses.
    """

    patch_mpp: float | None = None
    """µm per pixel of the patches; None if it is unknown."""

    @property
    def columns(self) -> int:
        """Number of counts of a patch; see `Segmentation.output_names`."""
        return self.outputs**2 + 3 * BINS + 2 * self.outputs

    def losses(self, part: BatchTensors, logits: tf.Tensor, smoothing: float = 0.0) -> tf.Tensor:
        """Return the (B,) losses of (B, H, W, K) values of the last layer."""
        annotated, truth = self._truth(part, logits.dtype)
        labels = tf.argmax(truth, axis=-1)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        count = tf.maximum(tf.reduce_sum(annotated, axis=[1, 2]), 1.0)
        entropy = tf.reduce_sum(each * annotated, axis=[1, 2]) / count
        predicted = tf.nn.softmax(logits) * annotated[..., None]
        both, of_truth, of_predicted = (
            tf.reduce_sum(values, axis=[1, 2]) for values in (predicted * truth, truth, predicted)
        )
        dice = tf.math.divide_no_nan(2 * both, of_truth + of_predicted)
        present = tf.cast(of_truth > 0, logits.dtype)
        mean = tf.math.divide_no_nan(
            tf.reduce_sum(dice * present, axis=-1), tf.reduce_sum(present, axis=-1)
        )
        return entropy + 1 - mean

    def outcomes(
        self, truth: BatchTensors, outputs: tf.Tensor, *, final: bool = False
    ) -> tf.Tensor:
        """Return the (B, C) counts of annotated pixels: the confusion, and if `final`, those of bins and boundaries."""
        outputs = tf.cast(outputs, tf.float32)
        annotated, of_classes = self._truth(truth, tf.float32)
        best = tf.argmax(outputs, axis=-1, output_type=tf.int32)
        predicted = tf.one_hot(best, self.outputs)
        confusion = tf.einsum("bhwi,bhwj->bij", of_classes, predicted)
        rows = tf.shape(outputs)[0]
        counts = tf.reshape(confusion, [rows, self.outputs**2])
        if not final:
            return tf.pad(counts, [[0, 0], [0, self.columns - self.outputs**2]])
        confidence = tf.reduce_max(outputs, axis=-1)
        bins = tf.minimum(tf.cast(confidence * BINS, tf.int32), BINS - 1)
        right = tf.reduce_sum(of_classes * predicted, axis=-1)
        of_bins = [
            tf.reduce_sum(tf.where(bins == number, values, 0.0), axis=[1, 2])
            for values in (annotated, annotated * confidence, right)
            for number in range(BINS)
        ]
        boundaries = tf.numpy_function(
            self._boundaries, [truth["mask"], best], tf.float32, stateful=False
        )
        boundaries = tf.ensure_shape(boundaries, [None, 2 * self.outputs])
        return tf.concat([counts, tf.stack(of_bins, axis=1), boundaries], axis=1)

    def _truth(self, part: BatchTensors, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """Return which pixels are annotated, (B, H, W), and their classes, (B, H, W, K); all of them 0 or 1."""
        mask = tf.cast(part["mask"], tf.int32)
        return tf.cast(mask != NOT_ANNOTATED, dtype), tf.one_hot(mask, self.outputs, dtype=dtype)

    def _boundaries(
        self, masks: NDArray[np.uint8], predicted: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Return for each patch the distance of each class, and whether there is one, (B, 2 K)."""
        values = np.zeros((len(masks), 2, self.outputs), np.float32)
        for row, (mask, best) in enumerate(zip(masks, predicted, strict=True)):
            annotated = mask != NOT_ANNOTATED
            for number in range(self.outputs if self.patch_mpp else 0):
                distance = boundary_distance(mask == number, best == number, annotated)
                if distance is not None:
                    values[row, :, number] = distance * float(self.patch_mpp or 0), 1
        return values.reshape(len(masks), -1)


def boundary_distance(
    true: NDArray[np.bool_], predicted: NDArray[np.bool_], annotated: NDArray[np.bool_]
) -> float | None:
    """Return the 95 % Hausdorff distance in pixels between the boundaries of two (H, W) areas; None if one has none.

    A boundary has the pixels of an area next to an annotated pixel that is not in it. The edge of the patch is none. It is
    the larger one of the 95th percentiles of the distances from each boundary to the other.
    """
    boundaries = []
    for area in (true, predicted):
        outside = np.pad(annotated & ~area, 1)
        near = outside[:-2, 1:-1] | outside[2:, 1:-1] | outside[1:-1, :-2] | outside[1:-1, 2:]
        boundaries.append(area & annotated & near)
    if not all(each.any() for each in boundaries):
        return None
    # Not by a tree of points: TensorFlow's threads compute without denormal numbers, with which SciPy's trees do not end.
    return max(
        float(np.percentile(scipy.ndimage.distance_transform_edt(~a)[b], _PERCENTILE))
        for a, b in (boundaries, boundaries[::-1])
    )


def build_segmenter(
    name: str,
    *,
    patch_size: int,
    objective: Objective,
    dropout: float,
    weights: str = "none",
    precision: Precision = "float32",
    trainable: str = "all",
    layer_decay: float = 1.0,
) -> PatchModel:
    """Build a patch model for segmentation: an encoder, and a decoder with a value for each class and pixel.

    Arguments and errors are those of `build_model`.
    """
    with dtype_policy(precision):
        image = keras.Input((patch_size, patch_size, 3), dtype="uint8", name="image")
        seed = keras.Input((), dtype="int64", name="seed")
        backbone = build_backbone(
            name, patch_size=patch_size, weights=weights, training=True, whole=True
        )
        frozen = set_trainable(backbone.core, trainable)
        maps = feature_maps(name, backbone, image, frozen=frozen)
        decoded = _decoded(maps, patch_size)
        last = keras.config.dtype_policy().variable_dtype
        head = layers.Conv2D(objective.outputs, 1, dtype=last, name=LOGITS)
        resized = layers.Resizing(patch_size, patch_size, dtype=last, name="resized_logits")
        trained = resized(head(SampleDropout(dropout)(decoded, seed)))
        serving = objective.layer(last)(resized(head(decoded)))
        training = keras.Model([image, seed], trained, name="training")
        return PatchModel(
            training,
            keras.Model(image, serving, name="segmenter"),
            rate_factors(backbone.core, training, layer_decay) if layer_decay < 1 else (),
            backbone.description,
        )


def feature_maps(
    name: str, backbone: Backbone, image: keras.KerasTensor, *, frozen: bool
) -> list[keras.KerasTensor]:
    """Return maps of features of an image, (B, h, w, C), from the coarsest to the finest.

    Of a convolutional network, they are the last ones of each size; of a Vision Transformer the tokens of its patches.

    Raises:
        UsageError: the network has no such maps.
    """
    core, options = backbone.core, {"training": False} if frozen else {}
    network, prepared = backbone.description.get("architecture"), backbone.prepare(image)
    if network is not None:
        tokens = keras.Model(core.inputs, core.get_layer("norm").output, name="tokens")
        x = tokens(prepared, **options)
        side = prepared.shape[1] // network["patch"]
        x = layers.Cropping1D((x.shape[1] - side**2, 0))(x)
        return [layers.Reshape((side, side, x.shape[-1]))(x)]
    outputs = [
        layer.output
        for layer in core.layers
        if isinstance(layer.output, keras.KerasTensor) and len(layer.output.shape) == 4
    ]
    shapes = keras.Model(core.inputs, outputs).compute_output_spec(prepared) if outputs else []
    last_of = {each.shape[1]: number for number, each in enumerate(shapes)}
    # A full-size map would cost more than all others, and has few features. Others are maps with a margin.
    sides, largest = [], (prepared.shape[1] + 1) // 2
    for side in sorted(last_of, reverse=True):
        if 1 < side <= largest:
            sides.append(side)
            largest = side * 3 // 4
    if not sides:
        raise UsageError(
            f"--model {name}",
            found="no maps of features",
            expected="a convolutional network, or a Vision Transformer of a preset",
        )
    chosen = [outputs[last_of[side]] for side in reversed(sides)]
    maps = keras.Model(core.inputs, chosen, name="encoder")(prepared, **options)
    return [maps] if len(chosen) == 1 else list(maps)


def _decoded(maps: Sequence[keras.KerasTensor], patch_size: int) -> keras.KerasTensor:
    """Return the (B, h, w, C) features of a light decoder: from map to map, each joined with the one before it.

    Normalization is by pixel, so that a pixel depends neither on other patches of a batch nor on far pixels: patches that
    overlap have the same classes.
    """
    sides = [each.shape[1] for each in maps]
    while sides[-1] * _COARSEST < patch_size:
        sides.append(2 * sides[-1])  # tokens have one size only
    x = None
    for place, side in enumerate(sides):
        width = _WIDTHS[min(len(sides) - 1 - place, len(_WIDTHS) - 1)]
        parts = [] if x is None else [layers.Resizing(side, side)(x)]
        if place < len(maps):
            parts.append(layers.Conv2D(width, 1, name=f"decoder_{place}_skip")(maps[place]))
        x = layers.Concatenate()(parts) if len(parts) > 1 else parts[0]
        x = layers.Conv2D(width, 3, padding="same", use_bias=False, name=f"decoder_{place}_conv")(x)
        x = layers.LayerNormalization(name=f"decoder_{place}_norm")(x)
        x = layers.Activation("relu")(x)
    return x
