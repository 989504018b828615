"""Operations of a network, by hand."""

from __future__ import annotations

import pytest

from helpers.lazy import keras


@pytest.mark.long(reason="loads TensorFlow")
def test_operations_of_a_small_network_are_those_counted_by_hand() -> None:
    from network_cost import model_cost

    image = keras.Input((8, 8, 3))
    values = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(image)
    values = keras.layers.DepthwiseConv2D(3, padding="same", use_bias=False)(values)
    values = keras.layers.Flatten()(values)
    model = keras.Model(image, keras.layers.Dense(5, use_bias=False)(values))
    convolution, depthwise, dense = 64 * 4 * 27, 64 * 4 * 9, 256 * 5
    forward = model_cost(model, 2, training=False)
    assert forward["flop_per_patch"] == 2 * (convolution + depthwise + dense)
    # Each value is read and written once, of 4 bytes; two patches share the weights.
    moved = (64 * 3 + 256) + (256 + 256) + (256 + 5) + (108 + 36 + 1280) / 2
    assert forward["bytes_per_patch"] == 4 * moved
    # Gradients of weights and of inputs; nothing needs that of the image.
    trained = model_cost(model, 2, training=True)
    assert trained["flop_per_patch"] == 2 * (2 * convolution + 3 * depthwise + 3 * dense)


def test_peaks_of_a_chip_are_those_of_its_data_sheet() -> None:
    from network_cost import device_peaks

    assert device_peaks("NVIDIA H100 80GB HBM3")[2] == 3.35e12
    assert device_peaks("NVIDIA H100 PCIe")[2] == 2.0e12
