"""Slide encoders against the code of their authors, by tiny networks with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.lazy import tf, training
from helpers.paths import SLIDE_ENCODERS
from helpers.slide_patches import SIDE, TWIN_ROWS, slide_patches
from histopipe.errors import SlideError, UsageError
from histopipe.pretrained.architecture import SlideArchitecture, select_weights
from histopipe.pretrained.checkpoints import Tensor, read_tensors
from histopipe.pretrained.presets import slide_preset, slide_preset_names

NAMES = sorted(path.stem for path in SLIDE_ENCODERS.glob("*.npz") if "tower" not in path.stem)
ROWS = (
    *TWIN_ROWS[:2],
    pytest.param(
        TWIN_ROWS[2],
        marks=pytest.mark.nightly(
            reason="nine times the patches; test_attention_in_blocks_is_attention has the blocks"
        ),
    ),
)
SLOW = pytest.mark.nightly(reason="the same code; madeleine and moozy are shown")


def architecture(name: str, **changes: object) -> SlideArchitecture:
    values = json.loads((SLIDE_ENCODERS / f"{name}.json").read_text())
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return SlideArchitecture(**{**values, **lists, **changes})


def read_selected(name: str) -> dict[str, Tensor]:
    return select(name, read_tensors(SLIDE_ENCODERS / f"{name}.safetensors"))


def select(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a twin among tensors."""
    path, family = SLIDE_ENCODERS / f"{name}.safetensors", training.slide_networks.FAMILIES[name]
    expected = training.slide_encoder.expected_weights(architecture(name), read_tensors(path))
    return select_weights(tensors, expected, path, first=family.first, unused=family.unused)


def load(name: str, precision: str = "float32", **changes: object) -> Any:
    return training.slide_encoder.SlideEncoder(
        architecture(name, **changes), read_selected(name), precision=precision
    )


def patches_of(rows: int) -> Any:
    features, corners = slide_patches(rows, 24)
    return training.slide_layers.PlacedPatches(features, corners.astype(np.float64), SIDE)


def close(values: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(values, expected, atol=1e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_of_the_authors(name: str, rows: int) -> None:
    expected, encoder = np.load(SLIDE_ENCODERS / f"{name}.npz"), load(name)
    vector, attention = encoder.encode(patches_of(rows))
    close(vector, expected[f"vector_{rows}"])
    if f"masked_{rows}" in expected:  # background or padding is left out here, and masked there
        close(vector, expected[f"masked_{rows}"])
    if f"attention_{rows}" in expected:
        assert attention is not None
        close(attention, expected[f"attention_{rows}"])
    if name == "moozy":
        slides = np.stack([vector, -vector, vector / 2])
        close(encoder.encode_patient(slides), expected[f"patient_{rows}"])
    if name == "longnet":
        mean, _ = load(name, pooling="mean").encode(patches_of(rows))
        close(mean, expected[f"mean_{rows}"])


def parameters(network: SlideArchitecture, names: Collection[str]) -> int:
    """Return the number of parameters. All blocks of LongNet are the same, and slow to describe."""
    if network.family == "longnet" and network.depth > 2:
        one, two = (parameters(replace(network, depth=depth), names) for depth in (1, 2))
        return one + (network.depth - 1) * (two - one)
    return sum(map(math.prod, training.slide_encoder.expected_weights(network, names).values()))


@pytest.mark.long(reason="describes networks of gigabytes")
def test_presets_have_the_published_number_of_parameters() -> None:
    published = json.loads((SLIDE_ENCODERS / "published.json").read_text())
    unused = {
        "abmil": 3 * 512 + 3,  # the classifier
        "clam": 2 * (512 * 2 + 2) + 512 * 2 + 2 + 512 * 256 + 256 + 256 + 1 + 768 * 512 + 512,
        "madeleine": 2048 * 128 + 128,
        "moozy": 768 - 12,  # the mask token; slopes are no parameters
        "titan": 128 * 768 + 4 * (768 * 768 + 768) + 4 * 768 + 768 * 768,
        "longnet": 2 * 768,
        "perceiver": 2 * 1280,
    }
    for name in slide_preset_names():
        preset = slide_preset(name)
        assert preset is not None
        case = [
            f"case_transformer.blocks.{n}.{p}.gamma"
            for n in range(3)
            for p in ("ls_attn", "ls_mlp")
        ]
        count = parameters(preset.slide_network, case)
        assert preset.parameters == count, name
        if preset.slide_network.family != "abmil" or preset.slide_network.features == 1024:
            assert (
                count + unused[preset.slide_network.family]
                == published[preset.slide_network.family]
            ), name


@given(
    items=st.integers(1, 4),
    queries=st.integers(1, 20),
    keys=st.integers(1, 20),
    block=st.integers(1, 60),
    least=st.integers(1, 5),
    biased=st.booleans(),
)
def test_attention_in_blocks_is_attention(
    items: int, queries: int, keys: int, block: int, least: int, biased: bool
) -> None:
    random = np.random.default_rng(items * queries * keys)
    q, k, v = (random.normal(size=(items, n, 4)).astype(np.float32) for n in (queries, keys, keys))
    bias = random.normal(size=(items, queries, keys)).astype(np.float32) * biased
    scores = q @ k.transpose(0, 2, 1) / 2 + bias
    norm = np.log(np.exp(scores).sum(-1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("histopipe.training.slide_layers.BLOCKS", {"CPU": block, "GPU": block})
        patch.setattr("histopipe.training.slide_layers.QUERIES", least)
        value, norms = training.slide_layers.attend(
            tf.constant(q),
            tf.constant(k),
            tf.constant(v),
            (lambda at, some: bias[some, at]) if biased else None,
        )
    np.testing.assert_allclose(norms, norm, atol=1e-5)
    np.testing.assert_allclose(value, np.exp(scores - norm[..., None]) @ v, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "madeleine",
        "moozy",
        *(pytest.param(name, marks=SLOW) for name in NAMES if name not in ("madeleine", "moozy")),
    ],
)
def test_deleting_what_contributes_most_lowers_the_output(name: str) -> None:
    """A planted signal: the patches of a region have what the output asks for, as a tumour would."""
    encoder, patches = load(name), patches_of(120)
    random, features = np.random.default_rng(2), np.array(patches.features)
    near = np.argsort(
        np.abs(np.asarray(patches.corners) - np.asarray(patches.corners)[5]).max(axis=1)
    )
    planted, before = near[:15], encoder.encode(patches)[0]
    features[planted] += 2 * random.normal(size=features.shape[1])
    patches = patches._replace(features=features)
    slopes = (encoder.encode(patches)[0] - before)[None]
    parts = encoder.contributions([patches], slopes, regions=8)[0][:, 0]

    def without(rows: np.ndarray) -> float:
        changed = features.copy()
        changed[rows] = features.mean(axis=0)
        return float(slopes[0] @ encoder.encode(patches._replace(features=changed))[0])

    whole = without(np.zeros(0, int))
    order = np.argsort(-parts, kind="stable")
    chosen = whole - without(order[:15])
    random_drops = [whole - without(random.permutation(120)[:15]) for _ in range(4)]
    assert chosen > max(random_drops)
    assert len(np.intersect1d(order[:15], planted)) >= 6
    regions = training.slide_encoder.regions_of(patches, 8)
    assert len(regions) == 8 and sorted(np.concatenate(regions)) == list(range(120))
    np.testing.assert_allclose(
        parts[regions[3]].sum(), whole - without(regions[3]), atol=1e-5 * max(1, abs(whole))
    )


def test_contributions_of_a_patient_are_of_all_its_slides() -> None:
    encoder, slides = load("moozy"), [patches_of(20), patches_of(30)]
    slopes = np.random.default_rng(3).normal(size=(2, 48))
    parts, _ = encoder.contributions(slides, slopes, regions=4, patient=True)
    vectors = [encoder.encode(patches)[0] for patches in slides]
    region = training.slide_encoder.regions_of(slides[1], 4)[2]
    features = np.array(slides[1].features)
    features[region] = features.mean(axis=0)
    changed = encoder.encode(slides[1]._replace(features=features))[0]
    outputs = [
        slopes @ encoder.encode_patient(np.stack([vectors[0], v])) for v in (vectors[1], changed)
    ]
    assert parts.shape == (50, 2)
    np.testing.assert_allclose(parts[20 + region].sum(axis=0), outputs[0] - outputs[1], atol=1e-5)


def test_precision_and_places() -> None:
    encoder, patches = load("moozy"), patches_of(300)
    exact, near = (each.encode(patches)[0] for each in (encoder, load("moozy", "mixed_bfloat16")))
    assert 1e-5 < np.abs(exact - near).max() < 0.05
    corners = np.asarray(patches.corners)
    moved = patches._replace(corners=corners + 7 * SIDE)
    np.testing.assert_allclose(encoder.encode(moved)[0], exact, atol=1e-6)
    for changes, message in (
        ({"corners": None}, "no coords"),
        ({"side": 0.0}, "no coords"),
        ({"corners": corners * 0}, "299 patches in the place of another"),
        ({"corners": corners * [1, 1.05]}, "away from a common grid"),
    ):
        with pytest.raises(SlideError, match=message):
            encoder.encode(patches._replace(**changes))


@pytest.mark.long(reason="builds the largest networks")
@pytest.mark.parametrize("name", NAMES)
def test_other_files_are_refused_by_name(name: str) -> None:
    tensors = dict(read_tensors(SLIDE_ENCODERS / f"{name}.safetensors"))
    last = training.slide_networks.FAMILIES[name].first
    first = next(key for key in tensors if key.endswith(last))
    surplus = f"{first.removesuffix(last)}{last}.more"
    for changed, message in (
        ({k: v for k, v in tensors.items() if k != first}, "missing"),
        ({**tensors, surplus: tensors[first]}, "surplus"),
        ({**tensors, first: replace(tensors[first], shape=(3, 3))}, "misshapen"),
        ({}, "missing"),
        ({**tensors, f"copy.{first}": tensors[first]}, "several networks"),
    ):
        with pytest.raises(UsageError, match=message):
            select(name, changed)
    wrapped = {f"wrapper.{key}": value for key, value in tensors.items()}
    assert select(name, wrapped).keys() == read_selected(name).keys()


def test_slide_models_have_the_logits_of_feather() -> None:
    """The twin's width is not that of slide models; in a copy with 480 units of zeros it is the same function."""
    expected, tensors = np.load(SLIDE_ENCODERS / "abmil.npz"), read_selected("abmil")
    classifier = read_tensors(SLIDE_ENCODERS / "abmil.safetensors")
    values = {name: tensor.read() for name, tensor in tensors.items()}
    width = training.bag_model.HIDDEN - len(values["patch_embed.0.bias"])
    for name, axes in {
        "global_attn.attention_a.0.weight": (0, 1),
        "global_attn.attention_b.0.weight": (0, 1),
        "patch_embed.0.weight": (1, 0),
        "patch_embed.0.bias": (1,),
    }.items():
        values[name] = np.pad(values[name], [(0, width * axis) for axis in axes])
    options: Any = {"objective": training.objective.ClassObjective(3), "dropout": 0.0}
    model = training.bag_model.BagModel("gated", dimension=24, attention=12, **options)
    layers = {
        layer: [values[f"{name}.weight"].T, values[f"{name}.bias"]]
        for layer, name in training.bag_weights.GATED_LAYERS["abmil"].items()
    }
    training.bag_weights.BagWeights(layers).assign(model)
    kernel = np.pad(classifier["classifier.weight"].read().T, ((0, width), (0, 0)))
    model.training.get_layer("logits").set_weights([kernel, classifier["classifier.bias"].read()])
    weights, last = map(training.models.values_of, (model.patch_weights, model.last_weights))
    for rows in TWIN_ROWS:
        patches = training.bag_model.Patches(tf.constant(patches_of(rows).features))
        pooled = training.bag_pooling.pool(model, weights, patches, tf.constant(4000)).value
        close(np.asarray(model.logits(last, pooled))[0], expected[f"logits_{rows}"])
