"""List the encoders that can be named, and show where their weights are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from histopipe.errors import UsageError
from histopipe.pretrained.presets import Preset, load_preset, preset_names
from histopipe.system.result import Result


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
        presets = {}
        for preset in self.presets:
            fields = asdict(preset)
            settings = fields.pop("preprocessing")
            presets[preset.name] = {**fields, "input": settings, "dimension": _dimension(preset)}
        return presets

    def __str__(self) -> str:
        if self.detailed:
            return "\n\n".join(map(_details, self.presets))
        rows = [("name", "features", "mpp", "licence")]
        for preset in self.presets:
            rows.append(
                (
                    preset.name,
                    str(_dimension(preset) or ""),
                    _scales(preset),
                    preset.licence.partition(":")[0],
                )
            )
        return "\n".join(
            f"{name:<16}{count:>8}  {mpp:<18}{licence}" for name, count, mpp, licence in rows
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
    if name is None:
        return EncodersResult(presets=tuple(map(load_preset, preset_names())), detailed=False)
    if name not in preset_names():
        raise UsageError(f"no encoder {name!r}", expected=", ".join(preset_names()))
    return EncodersResult(presets=(load_preset(name),), detailed=True)


def _dimension(preset: Preset) -> int | None:
    return preset.architecture.dimension if preset.architecture else None


def _scales(preset: Preset) -> str:
    return ", ".join(f"{mpp:g}" for mpp in preset.mpp) or "any"


def _details(preset: Preset) -> str:
    settings, network = preset.preprocessing, preset.architecture
    size = settings.resized
    crop = f", then the centre of {settings.size}" if settings.size < size else ""
    facts = {
        "reference": preset.reference,
        "licence": preset.licence,
        "patches": f"{size} pixels or a little larger, at {_scales(preset)} mpp after resizing",
        "input": f"resized to {size} pixels ({settings.interpolation}){crop}; "
        f"mean {_numbers(settings.mean)}; std {_numbers(settings.std)}",
    }
    include = f" --include '{preset.files[0]}' '*.json'" if preset.files else ""
    if network is not None:
        tokens = {
            "class": "class token",
            "class+mean": "class token and mean patch token",
            "tokens": "all tokens",
        }
        facts["features"] = f"{network.dimension:,}: {tokens[network.pooling]}"
        facts["network"] = (
            f"Vision Transformer, {network.depth} blocks, width {network.width}, patch {network.patch}, "
            f"{preset.parameters:,} parameters"
        )
    facts["weights"] = (
        f"{preset.repository} on Hugging Face: {' or '.join(preset.files) or 'the whole repository'}"
    )
    lines = [
        f"{preset.title} ({preset.name})",
        *(f"  {key:<11}{value}" for key, value in facts.items()),
    ]
    lines += [
        "Read the licence on the model's page, accept it there if asked, and download the weights:",
        "  pip install huggingface_hub && hf auth login",
        f"  hf download {preset.repository}{include} --local-dir {preset.name}",
        "Compute features:",
        f"  histopipe embed patches.lmdb --model {preset.name} --weights {preset.name} --out features",
    ]
    return "\n".join(lines)


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
