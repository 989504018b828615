"""List the encoders that can be named, and show where their weights are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from histopipe.errors import UsageError, reported_as
from histopipe.pretrained.presets import (
    SUFFIX,
    Preprocessing,
    Preset,
    check_preset,
    checked_value,
    load_preset,
    preset_names,
    slide_preset_names,
)
from histopipe.system.files import read_json
from histopipe.system.output import Result


@dataclass(frozen=True, kw_only=True, repr=False)
class EncodersResult(Result):
    """Result of `encoders`.

    Attributes:
        presets: the encoders.
        detailed: show all about them, and how to get their weights.
    """

    presets: tuple[Preset, ...]
    detailed: bool

    def to_json(self) -> dict[str, Any]:
        """Return the presets by name."""
        return {preset.name: preset.to_json() for preset in self.presets}

    def __str__(self) -> str:
        if self.detailed:
            return "\n\n".join(map(_details, self.presets))
        rows = [
            (
                preset.name,
                preset.dimension or "",
                _scales(preset),
                preset.licence.partition(":")[0],
            )
            for preset in self.presets
        ]
        return "\n".join(
            f"{name:<20}{count:>8}  {mpp:<20}{licence}"
            for name, count, mpp, licence in [("name", "features", "mpp", "licence"), *rows]
        )


def encoders(name: str | None = None) -> EncodersResult:
    """List the encoders (foundation models) that `embed` and `train` know by name.

    Args:
        name: show one encoder in detail, with the commands that download its weights.

    Returns:
        The encoders; printed as a table, or in detail.

    Raises:
        UsageError: there is no such encoder.

    Example:
        >>> print(encoders("phikon"))  # doctest: +ELLIPSIS
        Phikon (phikon)
        ...
    """
    every = {each: load_preset(each) for each in (*preset_names(), *slide_preset_names())}
    if name is not None and name not in every:
        raise UsageError(f"no encoder {name!r}", expected=", ".join(every))
    return EncodersResult(
        presets=tuple(every.values()) if name is None else (every[name],), detailed=name is not None
    )


def _scales(preset: Preset) -> str:
    if preset.network is not None:
        return f"slides, {preset.patch_encoders[0]}"
    return ", ".join(f"{mpp:g}" for mpp in preset.mpp) or "any"


def _details(preset: Preset) -> str:
    if preset.network is not None:
        patches = f"{preset.patch_size} pixels at {preset.mpp[0]:g} mpp, without overlap"
        side, dimension = preset.patch_encoders[0], preset.network.dimension
        rows = {
            "reference": preset.reference,
            "licence": preset.licence,
            "patches": f"features of {' or '.join(preset.patch_encoders)}, of {patches}",
            "vector": f"{dimension:,} values per slide, or per patient with --bag patient",
            "network": f"{preset.network.family}, {preset.parameters:,} parameters",
        }
        return _text(preset, rows, f"features-{side} --model {preset.name}", "slides")
    settings, network = preset.preprocessing, preset.architecture
    size = settings.resized
    crop = f", then the centre of {settings.size}" if settings.size < size else ""
    tokens = {
        "class": "class token",
        "class+mean": "class token and mean patch token",
        "attention": "attention of one query to all tokens",
        "tokens": "all tokens",
    }
    network_rows = (
        {}
        if network is None
        else {
            "features": f"{network.dimension:,}: {tokens[network.pooling]}",
            "network": f"Vision Transformer, {network.depth} blocks, width {network.width}, "
            f"patch {network.patch}, {preset.parameters:,} parameters",
        }
    )
    rows = {
        "reference": preset.reference,
        "licence": preset.licence,
        "patches": f"{size} pixels or a little larger, at {_scales(preset)} mpp after resizing",
        "input": f"resized to {size} pixels ({settings.interpolation}){crop}; "
        f"mean {_numbers(settings.mean)}; std {_numbers(settings.std)}",
        **network_rows,
    }
    return _text(preset, rows, f"patches.lmdb --model {preset.name}", "features")


def _text(preset: Preset, rows: Mapping[str, str], source: str, out: str) -> str:
    files = " or ".join(preset.files) or "the whole repository"
    rows = {**rows, "weights": f"{preset.repository} on Hugging Face: {files}"}
    include = f" --include '{preset.files[0]}' '*.json'" if preset.files else ""
    return "\n".join(
        [
            f"{preset.title} ({preset.name})",
            *(f"  {key:<11}{value}" for key, value in rows.items()),
            "Read the licence on the model's page, accept it there if asked, and download the weights:",
            "  pip install huggingface_hub && hf auth login",
            f"  hf download {preset.repository}{include} --local-dir {preset.name}",
            f"Compute {out}:",
            f"  histopipe embed {source} --weights {preset.name} --out {out}",
        ]
    )


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


KERAS, _PYTHON = ".keras", ".py"
SAVED_MODEL = "saved_model.pb"
_RESAMPLE = {2: "bilinear", 3: "bicubic"}
"""PIL's numbers of filters, in the files of Hugging Face."""


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
    if not path.exists():
        raise UsageError(f"--model {model}", found=f"no file {path}")
    preset_path = path.with_name(path.name + SUFFIX) if path.is_dir() else path.with_suffix(SUFFIX)
    if not preset_path.exists() and path.suffix != _PYTHON:
        raise UsageError(
            f"{preset_path} is missing: {path} does not describe its preprocessing",
            expected="a TOML file such as: [input] size = 224, mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5]",
            todo="write it with the size, mean and standard deviation that the network was trained with",
        )
    return load_preset(preset_path) if preset_path.exists() else None


def own_file(model: str) -> Path | None:
    """Return the path of the user's own network that a value of `--model` names, or None."""
    if model in preset_names():  # also if a folder has this name
        return None
    path = Path(model.rpartition(":")[0] if f"{_PYTHON}:" in model else model)
    return path if path.suffix in (KERAS, _PYTHON) or (path / SAVED_MODEL).is_file() else None


def check_untrusted_model(model: str, weights: str | None) -> None:
    """Refuse models that run code from their files.

    Raises:
        UsageError: the model is a SavedModel or a Python file.
    """
    path = own_file(model)
    is_code = path is not None and path.suffix == _PYTHON
    if is_code or any((Path(p) / SAVED_MODEL).exists() for p in (model, weights) if p):
        raise UsageError(
            "--untrusted",
            found=f"--model {model}: Python files and SavedModels can run any code",
            expected="weights in .safetensors, .bin, .pth or .keras files",
        )


def find_weights(preset: Preset, weights: Path) -> Path:
    """Return the file with the weights: `weights`, or one of the preset's files in the folder `weights`.

    Raises:
        UsageError: there is no such file.
    """
    if weights.is_file():
        return weights
    file = next((weights / name for name in preset.files if (weights / name).is_file()), None)
    if file is None:
        raise UsageError(
            f"no weights of {preset.name} at {weights}",
            found="no such file" if not weights.exists() else None,
            expected=" or ".join(preset.files) or "a file of weights",
            todo=f"see `histopipe encoders {preset.name}`"
            if preset.repository
            else "give the path of the file",
        )
    return file


def with_published_settings(preset: Preset, weights: Path) -> tuple[Preset, list[str]]:
    """Return a preset with the mean, std and interpolation in the files that were published with the weights.

    These are `config.json` of timm and `preprocessor_config.json` of Hugging Face, in the folder of `weights`. Sizes are
    the preset's, which follow the model's card. Also return the differences, for people.

    Raises:
        UsageError: such a file cannot be read, or a value in it is wrong.
    """
    settings = {
        key: (value, path)
        for path in map(weights.parent.joinpath, ("config.json", "preprocessor_config.json"))
        if path.exists()
        for key, value in _published(path).items()
    }
    hints, before = get_type_hints(Preprocessing), asdict(preset.preprocessing)
    changes = {
        key: checked_value(hints[key], value, f"{path}: {key}")
        for key, (value, path) in settings.items()
    }
    notes = [
        f"{settings[key][1]}: {key} {value} instead of the preset's {before[key]}"
        for key, value in changes.items()
        if value != before[key]
    ]
    changed = replace(preset, input=replace(preset.preprocessing, **changes))
    check_preset(changed, str(weights.parent))
    return changed, notes


def _published(path: Path) -> dict[str, Any]:
    with reported_as(UsageError, f"{path} cannot be read", (OSError, ValueError)):
        content = read_json(path)
    if not isinstance(content, dict):
        raise UsageError(
            f"{path} cannot be used", found=json.dumps(content)[:80], expected="an object"
        )
    timm = content.get("pretrained_cfg")
    table = timm if isinstance(timm, dict) else content
    names = {"image_mean": "mean", "image_std": "std", "resample": "interpolation"}
    settings = {names.get(name, name): value for name, value in table.items()}
    number = settings.get("interpolation")
    if type(number) is int:
        settings["interpolation"] = _RESAMPLE.get(number, number)
    return {
        name: settings[name]
        for name in ("mean", "std", "interpolation")
        if settings.get(name) is not None
    }
