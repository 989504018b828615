"""Presets of encoders: architecture, preprocessing, scale, licence and source of the weights, one TOML file each."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from histopipe.errors import UsageError
from histopipe.pretrained.architecture import Architecture
from histopipe.pretrained.naming import NAMINGS
from histopipe.pretrained.resampling import Interpolation
from histopipe.system.files import read_json

FOLDER = Path(__file__).with_name("presets")
SUFFIX = ".toml"
KERAS, _PYTHON = ".keras", ".py"
SAVED_MODEL = "saved_model.pb"
_MPP_TOLERANCE = 0.15
"""Published recipes resize patches of 256 pixels at 0.5 mpp to 224, which is 0.57 mpp."""
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""PIL's numbers of filters, in the files of Hugging Face."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """How a patch becomes the input of a network.

    Attributes:
        size: side of the input in pixels: the centre of the resized patch.
        resize: side in pixels to which a patch is resized; 0: as `size`.
        trained_size: side in pixels of the inputs that the position embeddings in the file are for; 0: as `size`.
        interpolation: filter of the resizing, antialiased and rounded as in PIL.
        mean, std: normalization of each channel, for pixels from 0 to 1.
    """

    size: int
    resize: int = 0
    trained_size: int = 0
    interpolation: Interpolation = "bilinear"
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def resized(self) -> int:
        """Side in pixels to which a patch is resized."""
        return self.resize or self.size

    @property
    def trained(self) -> int:
        """Side in pixels of the inputs that the position embeddings in the file are for."""
        return self.trained_size or self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """An encoder that can be named.

    Attributes:
        name: name on the command line.
        title, licence, reference: for people.
        repository, files: where the weights are on Hugging Face, and names of the file, best first.
        mpp: scales that it was trained on, in µm per pixel; empty: any.
        parameters: number of weights; 0: unknown.
        naming: names of the weights, see `NAMINGS`.
        architecture: of a Vision Transformer; None for a Keras model or a SavedModel.
        preprocessing: its input.
    """

    name: str
    title: str = ""
    licence: str = ""
    reference: str = ""
    repository: str = ""
    files: tuple[str, ...] = ()
    mpp: tuple[float, ...] = ()
    parameters: int = 0
    naming: str = "timm"
    architecture: Architecture | None = None
    preprocessing: Preprocessing

    def check_patches(
        self, patch_size: int, mpps: Sequence[float | None], *, allowed: bool
    ) -> str | None:
        """Check that patches have a size and scale that the network was trained on.

        Args:
            patch_size: side of the patches in pixels.
            mpps: scales of the patches of each slide, in µm per pixel; None if unknown.
            allowed: return the mismatch instead of raising an error.

        Raises:
            UsageError: the patches do not fit.
        """
        resized = self.preprocessing.resized
        problems = []
        if patch_size < resized:
            problems.append(f"patches of {patch_size} pixels would be enlarged")
        known = sorted(set(mpps), key=lambda mpp: mpp or 0.0) if self.mpp and not problems else ()
        for mpp in known:
            if mpp is None:
                problems.append("slides of unknown scale")
                continue
            seen = mpp * patch_size / resized
            if not any(abs(seen - wanted) <= _MPP_TOLERANCE * wanted for wanted in self.mpp):
                problems.append(
                    f"{mpp:.3g} mpp, which is {seen:.3g} mpp after resizing to {resized} pixels"
                )
        if not problems:
            return None
        found = f"patches of {patch_size} pixels: {'; '.join(problems)}"
        if allowed:
            return found
        scales = f" at {' or '.join(f'{mpp:g}' for mpp in self.mpp)} mpp" if self.mpp else ""
        raise UsageError(
            f"the patches do not fit {self.name}", found=found,
            expected=f"patches of {resized} pixels{scales}, or a little larger",
            todo="ingest the slides with another --patch-size and --mpp, or add --allow-mismatch",
        )  # fmt: skip


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def load_preset(model: str | Path) -> Preset:
    """Load a preset by its name, or from the path of a TOML file.

    Raises:
        UsageError: there is no such preset, or a field is missing, unknown or wrong.
    """
    path = Path(model) if str(model).endswith(SUFFIX) else FOLDER / f"{model}{SUFFIX}"
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"preset {model} cannot be read", found=str(error),
            expected=f"a TOML file, or one of {', '.join(preset_names())}",
        ) from error  # fmt: skip
    own: dict[str, Any] = {"name": path.stem}
    if "architecture" in values:
        table = values.pop("architecture")
        own["architecture"] = _fields(Architecture, table, f"{path.name}, [architecture]")
    own["preprocessing"] = _fields(Preprocessing, values.pop("input", {}), f"{path.name}, [input]")
    preset: Preset = _fields(Preset, {**values, **own}, path.name)
    _check(preset, path.name)
    return preset


def named_preset(model: str) -> Preset | None:
    """Return the preset that a value of `--model` names or has next to it; None if it has none.

    Raises:
        UsageError: the preset cannot be read, or a Keras file or SavedModel has none.
    """
    if model in preset_names() or model.endswith(SUFFIX):
        return load_preset(model)
    path = own_file(model)
    if path is None:
        return None
    own = path.with_suffix(SUFFIX) if path.is_file() else path.with_name(path.name + SUFFIX)
    if own.exists():
        return load_preset(own)
    if path.suffix == _PYTHON:
        return None
    raise UsageError(
        f"{own} is missing: {path} does not describe its preprocessing",
        expected="a TOML file such as: [input] size = 224, mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5]",
        todo="write it with the size, mean and standard deviation that the network was trained with",
    )


def own_file(model: str) -> Path | None:
    """Return the path of the user's own network that a value of `--model` names, or None."""
    path = Path(model.rpartition(":")[0] if f"{_PYTHON}:" in model else model)
    is_own = path.suffix in (KERAS, _PYTHON) or (path / SAVED_MODEL).is_file()
    return path if is_own else None


def check_untrusted_model(model: str, weights: str | None) -> None:
    """Refuse models that run code from their files.

    Raises:
        UsageError: the model is a SavedModel or a Python file.
    """
    folders = [Path(it) for it in (model, weights) if it]
    if f"{_PYTHON}:" in model or any((it / SAVED_MODEL).exists() for it in folders):
        raise UsageError(
            "--untrusted", found=f"--model {model}: Python files and SavedModels can run any code",
            expected="weights in .safetensors, .bin, .pth or .keras files",
        )  # fmt: skip


def find_weights(preset: Preset, weights: Path) -> Path:
    """Return the file with the weights: `weights`, or one of the preset's files in the folder `weights`.

    Raises:
        UsageError: there is no such file.
    """
    if weights.is_file():
        return weights
    found = [weights / name for name in preset.files if (weights / name).is_file()]
    if not found:
        raise UsageError(
            f"no weights of {preset.name} at {weights}", found="no such file" if not weights.exists() else None,
            expected=" or ".join(preset.files) or "a file of weights",
            todo=f"see `histopipe encoders {preset.name}`" if preset.repository else "give the path of the file",
        )  # fmt: skip
    return found[0]


def with_published_settings(preset: Preset, weights: Path) -> tuple[Preset, list[str]]:
    """Return a preset with the mean, std and interpolation in the files that were published with the weights.

    These are `config.json` of timm and `preprocessor_config.json` of Hugging Face, in the folder of `weights`. Sizes are
    the preset's, because published files of some models give those of another task than embedding. Also return the
    differences, for people.

    Raises:
        UsageError: such a file cannot be read, or a value in it is wrong.
    """
    found: dict[str, Any] = {}
    for name in ("config.json", "preprocessor_config.json"):
        path = weights.parent / name
        if path.exists():
            found |= {key: (value, path) for key, value in _published(path).items()}
    preprocessing, notes = preset.preprocessing, []
    hints = typing.get_type_hints(Preprocessing)
    for key, (value, path) in found.items():
        checked = _value(hints[key], value, f"{path}: {key}")
        before = getattr(preprocessing, key)
        if checked != before:
            notes.append(f"{path}: {key} {checked} instead of the preset's {before}")
            preprocessing = dataclasses.replace(preprocessing, **{key: checked})
    changed = dataclasses.replace(preset, preprocessing=preprocessing)
    _check(changed, str(weights.parent))
    return changed, notes


def _published(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error)) from error
    if not isinstance(content, dict):
        raise UsageError(
            f"{path} cannot be used", found=json.dumps(content)[:80], expected="an object"
        )
    timm = content.get("pretrained_cfg")
    table = timm if isinstance(timm, dict) else content
    names = {"image_mean": "mean", "image_std": "std", "resample": "interpolation"}
    own = {names.get(name, name): value for name, value in table.items()}
    own["interpolation"] = _RESAMPLE.get(own.get("interpolation", 0), own.get("interpolation"))
    return {
        name: own[name] for name in ("mean", "std", "interpolation") if own.get(name) is not None
    }


def _check(preset: Preset, where: str) -> None:
    """Check values that depend on each other."""
    if preset.naming not in NAMINGS:
        raise UsageError(f"{where}: naming", found=preset.naming, expected=", ".join(NAMINGS))
    settings = preset.preprocessing
    if not 0 < settings.size <= settings.resized:
        raise UsageError(
            f"{where}: size",
            found=settings.size,
            expected=f"1 to {settings.resized}, the size after resizing",
        )
    if min(settings.std) <= 0:
        raise UsageError(f"{where}: std", found=settings.std, expected="above 0")
    network = preset.architecture
    if network is None:
        return
    for name, size in (("size", settings.size), ("trained_size", settings.trained_size)):
        if size % network.patch:
            raise UsageError(
                f"{where}: {name}", found=size,
                expected=f"a multiple of the network's patch of {network.patch} pixels",
            )  # fmt: skip
    if network.width % network.heads:
        raise UsageError(
            f"{where}: width", found=network.width, expected=f"a multiple of heads, {network.heads}"
        )


def _fields(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Create a dataclass from the values of a TOML table, with checked names and types."""
    declared = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(values.keys() - declared.keys())
    missing = sorted(
        name
        for name, field in declared.items()
        if field.default is dataclasses.MISSING and name not in values
    )
    if unknown or missing:
        states = (("unknown", unknown), ("missing", missing))
        raise UsageError(
            f"{where}: fields", found="; ".join(f"{state}: {', '.join(names)}" for state, names in states if names),
            expected=", ".join(declared),
        )  # fmt: skip
    hints = typing.get_type_hints(kind)
    return kind(
        **{name: _value(hints[name], value, f"{where}: {name}") for name, value in values.items()}
    )


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return a value with the type of a field."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or dataclasses.is_dataclass(hint):
        return value  # a table, already checked
    if origin is Literal:
        if value in choices:
            return value
    elif origin is tuple:
        kind, count = choices[0], None if choices[-1] is ... else len(choices)
        numbers = (int, float) if kind is float else (kind,)
        if (
            isinstance(value, list)
            and count in (None, len(value))
            and all(type(it) in numbers for it in value)
        ):
            return tuple(kind(it) for it in value)
    elif hint is int and type(value) is int and 0 <= value < 1 << 40:
        return value
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint in (str, bool) and type(value) is hint:
        return value
    expected = " or ".join(map(str, choices)) if origin is Literal else _described(hint)
    raise UsageError(where, found=repr(value), expected=expected)


def _described(hint: Any) -> str:
    choices = typing.get_args(hint)
    if not choices:
        return f"a value of type {hint.__name__}"
    count = "" if choices[-1] is ... else f"{len(choices)} "
    return f"a list of {count}values of type {choices[0].__name__}"
