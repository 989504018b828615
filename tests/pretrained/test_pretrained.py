"""Files of published weights, and the presets of the encoders. No TensorFlow."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

import histopipe
from helpers.commands import RunCommand
from helpers.paths import ENCODERS
from histopipe.errors import UsageError
from histopipe.pretrained.architecture import NAMINGS, expected_shapes, resampling_matrix, select
from histopipe.pretrained.checkpoints import Tensor, read_tensors
from histopipe.pretrained.encoders import named_preset, with_published_settings
from histopipe.pretrained.presets import load_preset, preset_names, slide_preset_names

TINY = ENCODERS / "tiny.toml"


def values_of(path: Path) -> dict[str, NDArray[np.float32]]:
    return {name: tensor.read() for name, tensor in read_tensors(path).items()}


# Values of files that torch wrote.


@pytest.mark.parametrize(
    ("form", "tolerance"),
    [
        ("float32", 0),
        ("parameters", 0),
        ("strided", 0),
        ("slices", 0),
        ("nested", 0),
        ("float16", 1e-3),
        ("bfloat16", 1e-2),
        ("legacy", 0),
    ],
)
def test_files_of_torch(form: str, tolerance: float) -> None:
    shapes = {n: t.shape for n, t in read_tensors(ENCODERS / "torch-state.pth").items()}
    assert shapes == {"weight": (3, 4), "bias": (3,)}  # a state of a module
    expected = np.load(ENCODERS / "torch.npz")
    prefix = "model.state." if form == "nested" else ""
    tensors = values_of(ENCODERS / f"torch-{form}.pth")
    assert set(tensors) == {prefix + name for name in expected}
    for name, values in expected.items():
        np.testing.assert_allclose(tensors[prefix + name], values, rtol=tolerance)
        assert tensors[prefix + name].shape == values.shape


# Files that are refused.


class Malicious:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


def torch_zip(content: bytes) -> bytes:
    """Return a file of `torch.save` with this pickle, and a storage of six numbers."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", content)
        archive.writestr("a/data/0", np.arange(6, dtype=np.float32).tobytes())
    return file.getvalue()


def tensor_pickle(offset: int, size: Any, stride: Any, *, count: int = 6, key: str = "0") -> bytes:
    """The pickle of `{"a": tensor}`."""

    def integers(*values: int) -> bytes:
        return b"".join(b"J" + struct.pack("<i", value) for value in values)

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    arguments = b"(" + storage + integers(count) + b"tQ" + integers(offset)
    arguments += b"(" + integers(*size) + b"t(" + integers(*stride) + b"t"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"
    return b"\x80\x02}" + text("a") + tensor + b"s."


PICKLES = (
    (pickle.dumps(Malicious()), "the name 'posix.system'"),
    (pickle.dumps({"a": Malicious()}, 0), "the pickle instruction DICT"),
    (
        b"\x80\x04\x8c\x0ctorch._utils\x8c\x1e_rebuild_tensor_v2.__globals__\x93.",
        "__globals__'",
    ),
    (b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "the name 'builtins.eval'"),
    (b"(X\x02\x00\x00\x00osX\x06\x00\x00\x00systemi.", "damaged"),
    (b"\x80\x02K\x01K\x02R.", "a call of something that is no function"),
    (b"\x80\x02}", "damaged"),
    (b"", "damaged"),
    (b"\x80\x02K\x01.", "a int"),
    (tensor_pickle(0, (2, 4), (4, 1)), "larger than its storage"),
    (tensor_pickle(1, (2, 3), (3, 1)), "larger than its storage"),
    (tensor_pickle(0, (2, 3), (-3, 1)), "negative"),
    (tensor_pickle(-1, (2, 3), (3, 1)), "negative"),
    (tensor_pickle(0, (1000, 1000, 1000), (0, 0, 0)), "more numbers than its storage"),
    (tensor_pickle(0, (2, 3), (3, 1), count=7), "for 7 numbers"),
    (tensor_pickle(0, (2, 3), (3, 1), key="../data.pkl"), "damaged"),
    # A list in the place of a shape, which could be extended after the check.
    (
        tensor_pickle(0, (2, 3), (3, 1)).replace(
            b"J\x02\0\0\0J\x03\0\0\0t", b"J\x02\0\0\0J\x03\0\0\0l"
        ),
        "no tuple",
    ),
    # Nested tuples as names: their hash, or their text, would take endless time.
    (b"\x80\x02})" + 60 * b"q\0h\0\x86" + b"K\x01s.", "a name that is no short text"),
    (
        b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\n)" + 60 * b"q\0h\0\x86" + b"NK\x01tQ.",
        "a storage without a name",
    ),
    # A dictionary that contains itself.
    (
        b"\x80\x02}q\0(" + b"".join(b"X\x02\0\0\0%02dh\0" % n for n in range(50)) + b"u.",
        "nested too deep",
    ),
    (b"\x80\x02" + 1_100_000 * b"}" + b".", "too many pickle instructions"),
)
"""Pickles that are refused, with the reason."""
OLD = (ENCODERS / "torch-legacy.pth").read_bytes()
OLD_FILES = (
    (OLD[:-1], "damaged storage"),
    (OLD[:300], "damaged"),
    (OLD[:40], "damaged"),
    (OLD.replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2), 1), "a pickle of another kind"),
    (OLD.replace(b"\x88", b"\x89", 1), "big-endian"),
    ((ENCODERS / "torch-module.pth").read_bytes(), "'torch.nn.modules.linear.Linear'"),
    (OLD[: OLD.index(b"\x80\x02}")] + pickle.dumps(Malicious(), 2), "'posix.system'"),
)
"""Files of torch before 1.6 that are refused, with the reason."""
ZIP = (ENCODERS / "torch-float32.pth").read_bytes()
VALUES = np.load(ENCODERS / "torch.npz")["a.weight"].tobytes()
NOT_FINITE = safetensors.numpy.save({"bad": np.array([1, np.nan], np.float32)})
OTHER_FILES = (
    ("a.bin", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    ("a.bin", b"\n<!doctype html><title>Access denied</title>", "an HTML or XML page"),
    ("a.bin", b"", "an empty file"),
    ("a.safetensors", struct.pack("<Q", 100 << 30) + b"{}", "unknown data"),
    ("a.bin", b"PK\x03\x04 not a zip", "zip file"),
    ("a.safetensors", struct.pack("<Q", 3) + b"{}}", "unknown data"),
    ("a.pth", ZIP[:-100], "File is not a zip file"),
    ("a.pth", ZIP.replace(VALUES, b"\xff" + VALUES[1:]), "a.weight: Bad CRC-32"),
    ("a.safetensors", NOT_FINITE, "bad: values that are not finite"),
)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("a.pth", torch_zip(content), message) for content, message in PICKLES),
        *(("a.pth", content, message) for content, message in OLD_FILES),
        *OTHER_FILES,
    ],
    ids=range(len(PICKLES) + len(OLD_FILES) + len(OTHER_FILES)),
)
def test_files_that_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    """Never executed. The CRC of the zip is checked when values are read."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        values_of(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert not Path("was-run").exists()


def test_an_intact_pickle_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(torch_zip(tensor_pickle(0, (2, 3), (3, 1))))
    assert values_of(tmp_path / "a.pth")["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.fixture(scope="module")
def events() -> list[str]:
    """The events that start something, in order. The hook remains until the interpreter ends."""
    recorded: list[str] = []
    starts = {"pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"}
    sys.addaudithook(lambda event, _: recorded.append(event) if event in starts else None)
    return recorded


@pytest.mark.parametrize("source", ["torch-nested.pth", "torch-float32.pth", "timm.safetensors"])
def test_damaged_files_are_refused_or_read(source: str, tmp_path: Path, events: list[str]) -> None:
    """Some 1,000 files: never executed, bounded memory, no other error."""
    values_of(ENCODERS / source)  # imports
    whole, draw, path = (ENCODERS / source).read_bytes(), random.Random(1), tmp_path / source
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    events.clear()
    refused, count = 0, 340
    for _ in range(count):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8, 64))):
            # The header of safetensors and the pickle are in the first 4,000 bytes.
            place = draw.randrange(min(len(damaged), 4000))
            if draw.random() < 0.2:
                del damaged[place : place + draw.randrange(1, 20)]
            else:
                damaged[place] = draw.randrange(256)
        if source.endswith("pth") and len(damaged) % 2 == 0:
            # A valid zip again, so that the damage reaches the interpreter of the pickle.
            start = damaged.find(b"data.pkl")
            damaged = bytearray(torch_zip(bytes(damaged[start + 8 : start + 800]).lstrip(b"FBZ0")))
        path.write_bytes(damaged)
        try:
            values_of(path)
        except UsageError:
            refused += 1
    assert events == [] and refused > count / 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


# Names of weights.


ARCHITECTURE: Any = load_preset(TINY).architecture


def fake(path: str) -> dict[str, Tensor]:
    shapes = expected_shapes(ARCHITECTURE, NAMINGS["timm"], 28)
    return {
        path.format(name): Tensor(shape, np.dtype(np.float32), Path("x"), lambda: np.zeros(()))
        for name, shape in shapes.items()
    }


def names_of(tensors: dict[str, Tensor]) -> set[str]:
    return set(select(tensors, ARCHITECTURE, NAMINGS["timm"], 28, Path("x.pth")))


def test_names_of_training_programs() -> None:
    plain = fake("{}")
    head = {"teacher.dino_head.w": plain["cls_token"]}
    for tensors in (
        plain,
        fake("module.{}"),
        {**fake("teacher.backbone.{}"), **fake("student.backbone.{}"), **head},
        {name.replace("blocks.", "blocks.0."): tensor for name, tensor in plain.items()},
        {**plain, "mask_token": plain["cls_token"]},
    ):
        assert names_of(tensors) == set(plain)
    with pytest.raises(UsageError, match=r"several networks: found one\., two"):
        names_of({**fake("one.{}"), **fake("two.{}")})


# Presets.


def test_presets_are_complete() -> None:
    for name in preset_names():
        preset = load_preset(name)
        assert preset.title and preset.licence and preset.reference
        assert preset.repository.count("/") == 1
        assert preset.architecture is None or preset.files
        patch = preset.architecture.patch if preset.architecture else 1
        assert preset.preprocessing.trained % patch == 0
    with pytest.raises(UsageError, match="kaiko-s8, lunit-s8, midnight-12k"):
        load_preset("unii")
    assert named_preset("resnet50") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "patch = 7",
            "patches = 7",
            r"\[architecture\]: fields: found unknown: patches; missing: patch",
        ),
        (
            "size = 28",
            "size = 27",
            "size: found 27, expected a multiple of the network's patch of 7 pixels",
        ),
        ("size = 28", "size = 35", "size: found 35, expected 1 to 32"),
        ("heads = 3", "heads = 5", "width: found 12, expected a multiple of heads, 5"),
        (
            "mean = [0.5, 0.5, 0.5]",
            "mean = [0.5, 0.5]",
            r"mean: found \[0.5, 0.5\], expected a list of 3 values",
        ),
        (
            "std = [0.5, 0.5, 0.5]",
            "std = [0.5, 0.0, 0.5]",
            "std: found .*, expected finite numbers above 0",
        ),
        (
            "std = [0.5, 0.5, 0.5]",
            "std = [nan, 0.5, 0.5]",
            "std: found .nan, .*expected finite numbers above 0",
        ),
        ("heads = 3", "heads = 0", "heads: found .0., expected finite numbers above 0"),
        ("patch = 7", "patch = 0", "patch: found .0., expected finite numbers above 0"),
        ("[architecture]", "[[architecture]]", "architecture: found .* expected a table"),
        (
            'naming = "timm"',
            'naming = "hf-vit"',
            "layer_scale: found true, expected none with naming",
        ),
        ('naming = "timm"', 'name = "x"', "fields: found unknown: name"),
        (
            '"bicubic"',
            '"nearest"',
            "interpolation: found 'nearest', expected 'bilinear' or 'bicubic'",
        ),
        ('naming = "timm"', 'naming = "tim"', "naming: found tim, expected timm"),
        ("gated = true", "gated = 1", "gated: found 1, expected True or False"),
        ("naming = ", "names = ", "fields: found unknown: names"),
        ("[input]", "[input", "cannot be read"),
    ],
)
def test_wrong_presets(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = TINY.read_text()
    assert text.count(old) >= 1
    path = tmp_path / "own.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError, match=message):
        load_preset(path)


SLIDE_PRESETS = Path(histopipe.__file__).parent / "pretrained" / "slide_presets"


def test_an_encoder_of_the_other_kind_is_refused() -> None:
    of_slides, of_patches = load_preset("titan"), load_preset("uni")
    with pytest.raises(UsageError, match="titan: found a slide encoder, expected an encoder of p"):
        of_slides.check_patches(224, [0.5], allowed=True)
    with pytest.raises(UsageError, match="uni: found an encoder of patches, expected a slide enc"):
        of_patches.check_features(None, 1024, Path("features"), allowed=True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("patch_size = 512", "", "patch_size: found 0, expected a number above 0"),
        ("mpp = 0.5", "mpp = [1.0, 0.5]", "mpp: found 0, expected a number above 0"),
        ("mpp = 0.5", 'mpp = "1"', r"mpp: found \['1'\], expected a list, each item a number"),
        ("patch_size = 512", "naming = 'timm'", "fields: found unknown: naming"),
        ("[network]", "[architecture]", r"\[network\]: fields: found missing: .*family"),
        ("heads = 12", "heads = 7", "network: found width 768, 7 heads"),
    ],
)
def test_wrong_presets_of_slide_encoders(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = (SLIDE_PRESETS / "titan.toml").read_text()
    assert text.count(old) == 1
    path = tmp_path / "own.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=message):
        load_preset(path)


MANY_SCALES = [0.5 + n / 1000 for n in range(100)]


@pytest.mark.parametrize(
    ("preset", "patch", "mpps", "problem"),
    [
        ("uni", 224, [0.5], None),
        ("uni", 256, [0.5, 0.499], None),  # 0.57 mpp after resizing, as in the published recipes
        ("uni", 256, [0.51], None),  # a scanner whose 20× is 0.51 mpp
        ("uni", 448, [0.25], None),
        ("gigapath", 256, [0.5], None),
        ("virchow2", 256, [2.0], None),
        ("dinov2-small", 999, [9.0], None),
        (
            "uni",
            512,
            [0.5],
            "patches of 512 pixels: 0.5 mpp, which is 1.14 mpp after resizing to 224 pixels",
        ),
        ("uni", 512, MANY_SCALES, "and 97 more"),
        ("uni", 128, [0.5], "enlarged"),
        ("uni", 256, [0.5, 0.25], "0.25 mpp"),
        ("uni", 256, [None], "unknown scale"),
    ],
)
def test_patches_fit(
    preset: str, patch: int, mpps: list[float | None], problem: str | None
) -> None:
    message = load_preset(preset).check_patches(patch, mpps, allowed=True)
    assert message is None if problem is None else problem in str(message)


def test_patches_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"0\.25 mpp, which is 0\.25 mpp .*224 pixels at 0\.5 mpp"):
        load_preset("uni").check_patches(224, [0.25], allowed=False)


TIMM = {
    "pretrained_cfg": {
        "mean": [0.7, 0.5, 0.7],
        "std": [0.2, 0.2, 0.2],
        "interpolation": "bicubic",
    }
}
TRANSFORMERS = {
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
}


@pytest.mark.parametrize(
    ("name", "content", "mean", "count"),
    [
        ("config.json", TIMM, (0.7, 0.5, 0.7), 3),
        ("preprocessor_config.json", TRANSFORMERS, (0.485, 0.456, 0.406), 1),
    ],
)
def test_settings_published_with_the_weights_are_preferred(
    tmp_path: Path, name: str, content: Any, mean: tuple[float, ...], count: int
) -> None:
    uni, weights = load_preset("uni"), tmp_path / "pytorch_model.bin"
    assert with_published_settings(uni, weights) == (uni, [])
    (tmp_path / name).write_text(json.dumps(content))
    preset, notes = with_published_settings(uni, weights)
    used = preset.preprocessing
    assert (used.mean, used.interpolation, used.size) == (mean, "bicubic", 224)
    assert len(notes) == count
    assert "interpolation bicubic instead of the preset's bilinear" in notes[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"mean": "grey"}, r"config\.json: mean: found 'grey'"),
        ({"interpolation": ["a"]}, r"interpolation: found \['a'\]"),
        ([1], r"config\.json cannot be used"),
    ],
)
def test_wrong_published_settings_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=message):
        with_published_settings(load_preset("uni"), tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(("source", "target"), [(256, 224), (224, 256), (512, 224), (7, 3)])
@pytest.mark.parametrize("antialiased", [True, False])
def test_resampling_matrices_keep_a_constant(source: int, target: int, antialiased: bool) -> None:
    matrix = resampling_matrix(source, target, "bicubic", antialiased=antialiased)
    assert matrix.shape == (source, target)
    np.testing.assert_allclose(matrix.sum(axis=0), 1)


# The command.


def test_encoders_command(run: RunCommand) -> None:
    listed, details, wrong = run("encoders"), run("encoders", "uni").stdout, run("encoders", "unii")
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) == 1 + len(preset_names()) + len(slide_preset_names())
    files = "hf download MahmoodLab/UNI --include 'pytorch_model.bin' '*.json' --local-dir uni"
    assert files in details and "no commercial use" in details
    assert json.loads(run("encoders", "uni", "--json").stdout)["uni"]["dimension"] == 1024
    assert (wrong.returncode, "no encoder 'unii'" in wrong.stderr) == (2, True)
    assert str(histopipe.encoders("virchow2")).startswith("Virchow2 (virchow2)")
