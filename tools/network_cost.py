"""Count the operations and the bytes of a Keras network, and the peaks of chips."""

from __future__ import annotations

import math
import time
from typing import Any

import keras
import tensorflow as tf

PEAKS = {
    "H200": (989.4e12, 494.7e12, 4.8e12),
    "H100 PCIe": (756e12, 378e12, 2.0e12),
    "H100 NVL": (835e12, 417.5e12, 3.9e12),
    "H100": (989.4e12, 494.7e12, 3.35e12),
    "A100-SXM4-40GB": (312e12, 156e12, 1.555e12),
    "A100-PCIE-40GB": (312e12, 156e12, 1.555e12),
    "A100 80GB PCIe": (312e12, 156e12, 1.935e12),
    "A100": (312e12, 156e12, 2.039e12),
}
"""FLOP/s in bfloat16 and in float32, which TensorFlow computes as TF32; bytes/s. The first part of a name counts."""
# Source: NVIDIA's data sheets of these chips, dense, without sparsity.


def device_peaks(name: str | None) -> tuple[float, float, float, str]:
    """Return FLOP/s in bfloat16 and float32, bytes/s, and their source: a data sheet, or measured by product and copy."""
    for part, peaks in PEAKS.items():
        if name and part in name:
            return (*peaks, "data sheet")
    side = 8192 if name else 512

    def rate(work: float, make: Any) -> float:
        make().numpy()
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < 0.3:
            make().numpy()
            count += 1
        return work * count / (time.perf_counter() - begun)

    flop = []
    for dtype in (tf.bfloat16, tf.float32):
        a = tf.cast(tf.random.normal((side, side)), dtype)
        flop.append(rate(2.0 * side**3, lambda a=a: tf.matmul(a, a)[0, 0]))
    copied = tf.zeros((1 << (28 if name else 22),))
    return flop[0], flop[1], rate(8.0 * copied.shape[0], lambda: (copied + 1)[0]), "measured"


def model_cost(model: keras.Model, batch: int, *, training: bool) -> dict[str, float]:
    """Return `flop_per_patch` and `bytes_per_patch` of a forward pass; of the gradients, too, if `training`.

    Counted are convolutions and matrix products, two operations per multiplication and addition, and the bytes that
    these and fused batch normalizations read and write. All else is taken as fused with them: a lower bound.
    """
    specs = [tf.TensorSpec((batch, *x.shape[1:]), x.dtype) for x in model.inputs]

    def compute(*inputs: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            outputs = model(list(inputs) if len(inputs) > 1 else inputs[0], training=training)
            loss = tf.add_n(
                [tf.reduce_sum(tf.cast(x, tf.float32)) for x in tf.nest.flatten(outputs)]
            )
        weights = [variable.value for variable in model.trainable_variables]
        return (loss, tape.gradient(loss, weights)) if training else loss

    flop, moved = graph_cost(
        tf.function(compute, autograph=False).get_concrete_function(*specs).graph
    )
    return {"flop_per_patch": flop / batch, "bytes_per_patch": moved / batch}


def graph_cost(graph: Any) -> tuple[float, float]:
    """Return operations and bytes of a graph, without those of functions that it calls."""
    flop = moved = 0.0
    # TensorFlow creates gradients that nothing needs, and does not compute them.
    queue, needed = [tensor.op for tensor in graph.outputs], set()
    while queue:
        operation = queue.pop()
        if operation in needed:
            continue
        needed.add(operation)
        queue += [tensor.op for tensor in operation.inputs]
        work = _work(operation)
        if work or operation.type.startswith("FusedBatchNorm"):
            flop += work
            tensors = [*operation.inputs, *operation.outputs]
            moved += sum(_count(tensor) * tensor.dtype.size for tensor in tensors)
    return flop, moved


def _count(tensor: Any) -> int:
    return math.prod(n or 0 for n in tensor.shape) if tensor.shape.rank is not None else 0


def _work(operation: Any) -> float:
    kind, inputs, output = operation.type, operation.inputs, operation.outputs[:1]
    if kind == "Einsum":
        equation = operation.get_attr("equation").decode().split("->")[0].split(",")
        sizes = {
            letter: size
            for letters, tensor in zip(equation, inputs, strict=True)
            for letter, size in zip(letters, tensor.shape, strict=False)
        }
        return float(2 * math.prod(size or 0 for size in sizes.values()))
    if "MatMul" in kind:
        transposed = operation.get_attr("transpose_a" if kind == "MatMul" else "adj_x")
        return float(2 * _count(output[0]) * (inputs[0].shape[-2 if transposed else -1] or 0))
    if kind.startswith(("Conv2D", "DepthwiseConv2dNative")):
        # The gradients have as many products: of each value of the output's gradient with the filter.
        backward = "Backprop" in kind
        outputs = inputs[2] if backward else output[0]
        kernel = output[0] if kind.endswith("Filter") else inputs[1]
        if kind.endswith("Input"):
            kernel = inputs[1]
        sides = kernel.shape[:2] if kind.startswith("Depthwise") else kernel.shape[:3]
        return float(2 * _count(outputs) * math.prod(n or 0 for n in sides))
    return 0.0
