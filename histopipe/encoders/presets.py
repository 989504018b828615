"""Presets of encoders: architecture, preprocessing, scale, licence and source of the weights, one TOML file each."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from histopipe.encoders.architecture import Architecture
from histopipe.encoders.naming import NAMINGS
from histopipe.errors import UsageError

FOLDER = Path(__file__).with_name("presets")
Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """How a patch becomes the input of a network, as its model card describes it.

    Attributes:
        trained_size: side in pixels of the inputs that the position embeddings in the file are for.
        resize: side in pixels to which a patch is resized by PIL; 0 keeps its size.
        size: side of the input in pixels: the centre of the resized patch.
        interpolation: filter of PIL.
        mean, std: normalization of each channel, for pixels from 0 to 1.
    """

    trained_size: int
    resize: int
    size: int
    interpolation: Interpolation
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """An encoder that can be named.

    Attributes:
        name: name on the command line.
        title, licence, reference: for `histopipe encoders`.
        repository, files: where the weights are on Hugging Face, and names of the file, best first.
        mpp: scale of the patches that it was trained on, in µm per pixel.
        parameters: number of weights, to check the file.
        naming: names of the weights, see `NAMINGS`.
        architecture, preprocessing: the network, and its input.
    """

    name: str
    title: str
    licence: str
    reference: str
    repository: str
    files: tuple[str, ...]
    mpp: float
    parameters: int
    naming: str
    architecture: Architecture
    preprocessing: Preprocessing


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_preset(name: str) -> Preset:
    """Load a preset by its name, or from the path of a TOML file.

    Raises:
        UsageError: there is no such preset, or a field is missing, unknown or wrong.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"preset {name} cannot be read", found=str(error), expected=", ".join(preset_names())
        ) from error
    architecture = _fields(Architecture, values.pop("architecture", {}), f"{path.name}, architecture")
    preprocessing = _fields(Preprocessing, values.pop("input", {}), f"{path.name}, input")
    own = {"name": path.stem, "architecture": architecture, "preprocessing": preprocessing}
    preset = _fields(Preset, values | own, path.name)
    if preset.naming not in NAMINGS:
        raise UsageError(f"{path.name}: naming", found=preset.naming, expected=", ".join(NAMINGS))
    if preset.preprocessing.size % preset.architecture.patch:
        raise UsageError(
            f"{path.name}: size", found=preset.preprocessing.size,
            expected=f"a multiple of the network's patch, {preset.architecture.patch}",
        )  # fmt: skip
    return preset


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
        raise UsageError(
            f"{where}: fields", found="; ".join(
                f"{state}: {', '.join(names)}"
                for state, names in (("unknown", unknown), ("missing", missing)) if names
            ),
            expected=", ".join(declared),
        )  # fmt: skip
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return a value with the type of a field."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in choices:
            return value
    elif origin is tuple:
        fits = isinstance(value, list) and (choices[-1] is ... or len(value) == len(choices))
        if fits and all(isinstance(it, (choices[0], int)) for it in value):
            return tuple(choices[0](it) for it in value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif type(value) is hint:
        return value
    expected = " or ".join(map(str, choices)) if origin is Literal else str(hint)
    raise UsageError(where, found=repr(value), expected=expected)
