"""Slide encoders with their weights, on several devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from histopipe.errors import DamagedStore
from histopipe.pretrained.architecture import SlideArchitecture, select_weights
from histopipe.pretrained.checkpoints import Tensor, read_tensors
from histopipe.training.devices import make_strategy
from histopipe.training.slide_layers import PlacedPatches, Weights
from histopipe.training.slide_networks import FAMILIES, moozy_patient


def expected_weights(
    network: SlideArchitecture, names: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each weight of a network, of which a file has some `names`. Nothing is computed."""
    weights = Weights(names=names)
    with tf.Graph().as_default():
        corners = np.array([[0.0, 0.0], [1.0, 0.0]])
        patches = PlacedPatches(tf.zeros((2, network.features)), corners, 1.0)
        vector = FAMILIES[network.family].encode(network, weights, patches)
        if network.patient_depth:
            moozy_patient(network, weights, vector.value[None])
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
        self, patches: PlacedPatches, device: str | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the (W,) vector of a slide, and the (N,) attention of its patches if the network has one.

        Raises:
            SlideError: the network needs positions that the slide does not have.
            DamagedStore: the vector is not finite.
        """
        device = device or self.devices[0]
        with tf.device(device):
            features = tf.cast(tf.convert_to_tensor(patches.features), tf.float32)
            vector = FAMILIES[self.network.family].encode(
                self.network, self._weights[device], patches._replace(features=features)
            )
            attention = None if vector.attention is None else vector.attention.numpy()
            return _finite(vector.value.numpy()), attention

    def encode_patient(self, slides: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the (W,) vector of a patient from (S, W) vectors of slides: their mean if the network has no other way."""
        device = self.devices[0]
        with tf.device(device):
            vector = (
                moozy_patient(self.network, self._weights[device], tf.constant(slides))
                if self.network.patient_depth
                else tf.reduce_mean(tf.constant(slides), axis=0)
            )
            return _finite(vector.numpy())

    def contributions(
        self,
        slides: Sequence[PlacedPatches],
        slopes: NDArray[np.floating],
        *,
        regions: int,
        patient: bool = False,
    ) -> tuple[NDArray[np.float64], NDArray[np.floating] | None]:
        """Return what each patch of a slide, or of all slides of a `patient`, adds to C outputs, (N, C), and (N,) attention.

        The patches of a region are replaced by the mean patch of the slide; the change of an output is shared by them. This
        needs a pass per region. `slopes` (C, W) are those of the outputs for the vector.
        """
        vectors, shares = zip(*map(self.encode, slides), strict=True)
        whole = self.encode_patient(np.stack(vectors)) if patient else vectors[0]
        parts = []
        for number, patches in enumerate(slides):
            of_slide = np.zeros((len(patches.features), len(slopes)))
            for region in regions_of(patches, regions) if regions else ():
                features = np.array(patches.features)
                features[region] = features.mean(axis=0)
                vector = self.encode(patches._replace(features=features))[0]
                if patient:
                    changed = [*vectors[:number], vector, *vectors[number + 1 :]]
                    vector = self.encode_patient(np.stack(changed))
                of_slide[region] = slopes @ (whole - vector) / len(region)
            parts.append(of_slide)
        count = np.float32(len(slides))
        return np.concatenate(parts), None if shares[0] is None else np.concatenate(shares) / count


def regions_of(patches: PlacedPatches, most: int) -> list[NDArray[np.int64]]:
    """Return the rows of the patches in regions of neighbours: halves of halves, and so on, at most `most`."""
    corners = patches.corners
    places = np.arange(len(patches.features))[:, None] if corners is None else corners
    regions = [np.arange(len(places))]
    while 2 * len(regions) <= most and len(regions) < len(places):
        halves = []
        for rows in regions:
            longer = np.ptp(places[rows], axis=0).argmax()
            order = rows[np.argsort(places[rows, longer], kind="stable")]
            halves += [half for half in np.array_split(order, 2) if len(half)]
        regions = halves
    return regions


def read_weights(network: SlideArchitecture, path: Path) -> dict[str, Tensor]:
    """Return the weights in a file by their names. Raise a UsageError if it is of another network."""
    tensors, family = read_tensors(path), FAMILIES[network.family]
    expected = expected_weights(network, tensors)
    return select_weights(tensors, expected, path, first=family.first, unused=family.unused)


def load_slide_encoder(
    network: SlideArchitecture, path: Path, *, devices: str, precision: str
) -> SlideEncoder:
    """Load a slide encoder from the file of its weights.

    Raises:
        UsageError: the file cannot be read, or is of another network.
    """
    weights = read_weights(network, path)  # before the devices are set up: it may raise
    return SlideEncoder(network, weights, make_strategy(devices).extended.worker_devices, precision)


def _finite(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(vector).all():
        raise DamagedStore(
            "the vector of the slide is not finite", todo="check features and weights"
        )
    return vector
