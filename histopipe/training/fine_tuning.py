"""Which weights of a network are trained, and with which share of the learning rate."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator

import keras
import numpy as np
import tensorflow as tf

from histopipe.errors import UsageError
from histopipe.runs.task_config import parse_trainable

_BLOCK = re.compile(r"(?P<block>(conv\d+_)?block_?\d+[a-z]?)_")
"""Names of layers with their block: here, and in ResNet, DenseNet, EfficientNet, VGG and others."""
_NORMS = (keras.layers.BatchNormalization, keras.layers.LayerNormalization)
_LORA_LAYERS = ("query", "value")


def set_trainable(core: keras.Model, trainable: str) -> bool:
    """Freeze the weights of a backbone for a value of `--trainable`. Return whether all of it is frozen.

    "all"; "head": nothing of the backbone; "last:N": the last N blocks, or layers if the network has no blocks;
    "lora:R": low-rank matrices of rank R, added to the queries and values of the attention.

    Source:
        Hu et al. 2022, LoRA: Low-Rank Adaptation of Large Language Models.

    Raises:
        UsageError: the network has no attention layers for "lora", or fewer blocks than N.
    """
    kind, number = parse_trainable(trainable)
    if kind == "head":
        core.trainable = False
    elif kind == "last":
        blocks = _blocks(core)
        if number > len(blocks):
            raise UsageError(
                f"--trainable {trainable}", found=f"{len(blocks)} blocks or layers in {core.name}",
                expected="at most that many",
            )  # fmt: skip
        for layer in itertools.chain(*blocks[: len(blocks) - number]):
            layer.trainable = False
    elif kind == "lora":
        _add_lora(core, trainable, number)
    return kind == "head"


def changing_state(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that training changes without gradients: batch statistics and the states of seeds."""
    frozen = {id(weight) for weight in frozen_weights(model)}
    return [weight for weight in model.non_trainable_variables if id(weight) not in frozen]


def frozen_weights(model: keras.Model) -> list[keras.Variable]:
    """Return the weights that training does not change, including the batch statistics of frozen layers."""
    frozen = []
    for layer in model._flatten_layers():
        if not isinstance(layer, keras.Model):
            layer_weights = [
                *layer._trainable_variables,
                *(() if layer.trainable else layer._non_trainable_variables),
            ]
            frozen += [
                weight for weight in layer_weights if not (layer.trainable and weight.trainable)
            ]
    return frozen


def digest(weights: Iterable[keras.Variable]) -> str:
    """Return the SHA-256 of weights, read one at a time."""
    checksum = hashlib.sha256()
    for weight in weights:
        checksum.update(np.ascontiguousarray(weight.value).tobytes())
    return checksum.hexdigest()


def check_weights(variables: Iterable[keras.Variable], where: str, todo: str) -> None:
    """Raise a UsageError if a variable is NaN or infinite. Losses do not show it: a ReLU layer turns NaN into 0."""
    for variable in variables:
        value = tf.convert_to_tensor(variable.value)
        if value.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(value)):
            raise UsageError(
                f"{where}: the weights {variable.path} are not finite",
                expected="numbers",
                todo=todo,
            )


def rate_factors(core: keras.Model, model: keras.Model, decay: float) -> list[float]:
    """Return the factor of the learning rate for each trainable weight of a model with this backbone.

    1 for the head, `decay` for the last block, `decay` squared for the block before it, and so on.

    Source:
        Clark et al. 2020, ELECTRA, layer-wise learning-rate decay.
    """
    factors = {
        id(weight): decay**depth
        for depth, block in enumerate(reversed(_blocks(core)), 1)
        for layer in block
        for weight in layer.variables
    }
    return [factors.get(id(weight), 1.0) for weight in model.trainable_variables]


def _blocks(core: keras.Model) -> list[list[keras.layers.Layer]]:
    """Return the layers with weights by block, first to last.

    A layer without a block in its name is a block, with the norm that follows. Those after the last block, such as the final norm of a Vision Transformer, are part of it.
    """
    blocks: list[list[keras.layers.Layer]] = []
    names: list[str] = []
    for layer in _leaves(core):
        match = _BLOCK.match(layer.name)
        name = match["block"] if match else layer.name
        if names and not match and isinstance(layer, _NORMS):
            name = names[-1]
        if not names or names[-1] != name:
            blocks.append([])
            names.append(name)
        blocks[-1].append(layer)
    last = max(
        (place for place, block in enumerate(blocks) if _BLOCK.match(block[0].name)), default=None
    )
    if last is not None:
        blocks[last:] = [list(itertools.chain(*blocks[last:]))]
    return blocks


def _leaves(model: keras.Model) -> Iterator[keras.layers.Layer]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _leaves(layer)
        elif layer.weights:
            yield layer


def _add_lora(core: keras.Model, trainable: str, rank: int) -> None:
    layers = [layer for layer in _leaves(core) if layer.name.rpartition("_")[2] in _LORA_LAYERS]
    if not layers or not all(isinstance(layer, keras.layers.Dense) for layer in layers):
        raise UsageError(
            f"--trainable {trainable}", found=f"no attention layers in {core.name}",
            expected="a Vision Transformer of a preset", todo="use head or last:N",
        )  # fmt: skip
    for weight in core.variables:
        weight.trainable = False
    for layer in layers:
        layer.enable_lora(rank)
