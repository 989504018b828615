"""Set the weights of a Vision Transformer from the tensors of a published checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import keras
import numpy as np
from numpy.typing import NDArray

from histopipe.pretrained.architecture import Architecture
from histopipe.pretrained.naming import Naming
from histopipe.pretrained.resampling import resize_positions
from histopipe.pretrained.tensors import Tensor

WeightArray = NDArray[np.float32]


def assign_weights(
    model: keras.Model, network: Architecture, naming: Naming, tensors: Mapping[str, Tensor]
) -> None:
    """Set the weights of a `vision_transformer`, layer by layer. Positions are resized to its input size."""
    read = _Reader(network, naming, tensors)
    side = model.input_shape[1] // network.patch
    model.get_layer("embedding").set_weights(list(read.embedding(side)))
    for number in range(network.depth):
        for name in ("norm1", "norm2"):
            model.get_layer(f"block_{number}_{name}").set_weights(
                read.linear(getattr(naming, name), number, transposed=False)
            )
        for name, weights in (*read.attention(number), *read.feed_forward(number)):
            model.get_layer(f"block_{number}_{name}").set_weights(weights)
    model.get_layer("norm").set_weights(read.linear(naming.norm, 0, transposed=False))


class _Reader:
    """Tensors of a checkpoint in the shapes of the layers of Keras."""

    def __init__(
        self, network: Architecture, naming: Naming, tensors: Mapping[str, Tensor]
    ) -> None:
        self._network, self._naming, self._tensors = network, naming, tensors

    def linear(self, name: str, number: int, *, transposed: bool = True) -> list[WeightArray]:
        """Return kernel and bias. PyTorch's kernels are (outputs, inputs)."""
        name = name.format(number)
        kernel, bias = (self._tensors[f"{name}.{kind}"].read() for kind in ("weight", "bias"))
        return [kernel.T if transposed else kernel, bias]

    def embedding(self, side: int) -> Iterator[WeightArray]:
        """Yield the (patch * patch * 3, D) kernel and the (T, D) bias of the embedding."""
        network, naming, width = self._network, self._naming, self._network.width
        kernel, bias = self.linear(naming.patch, 0, transposed=False)
        yield kernel.transpose(2, 3, 1, 0).reshape(-1, width)
        tokens = [self._tensors[naming.class_token].read()[0]]
        if network.registers:
            tokens.append(self._tensors[naming.registers].read()[0])
        prefix = np.concatenate(tokens)
        positions = self._tensors[naming.positions].read()[0]
        prefix_count = {"patches": 0, "class": 1, "all": network.prefix}[network.positions]
        prefix[:prefix_count] += positions[:prefix_count]
        # The networks with registers resize with antialiasing, in every library.
        antialiased = naming.antialiased or network.registers > 0
        patches = resize_positions(positions[prefix_count:], side, antialiased=antialiased)
        yield np.concatenate([prefix, patches + bias])

    def attention(self, number: int) -> Iterator[tuple[str, list[WeightArray]]]:
        """Yield the layers of the attention. Heads are one after the other in the columns of their kernels."""
        width = self._network.width
        pairs = [self.linear(name, number) for name in self._naming.qkv]
        kernel, bias = (np.concatenate(parts, axis=-1) for parts in zip(*pairs, strict=True))
        for place, part in enumerate(("query", "key", "value")):
            columns = slice(place * width, (place + 1) * width)
            yield part, [kernel[:, columns], bias[columns]]
        kernel, bias = self.linear(self._naming.projection, number)
        scale = self._scale(self._naming.scale1, number)
        yield "projection", [kernel * scale, bias * scale]

    def feed_forward(self, number: int) -> Iterator[tuple[str, list[WeightArray]]]:
        """Yield the layers of the feed-forward network. The first half of a packed SwiGLU is the activated one."""
        network = self._network
        first, second = self._naming.gated if network.gated else self._naming.plain
        kernel, bias = self.linear(first, number)
        yield "hidden", [kernel[:, : network.hidden], bias[: network.hidden]]
        if network.gated:
            yield "gate", [kernel[:, network.hidden :], bias[network.hidden :]]
        kernel, bias = self.linear(second, number)
        scale = self._scale(self._naming.scale2, number)
        yield "output", [kernel * scale, bias * scale]

    def _scale(self, name: str, number: int) -> WeightArray | np.float32:
        return (
            self._tensors[name.format(number)].read()
            if self._network.layer_scale
            else np.float32(1)
        )
