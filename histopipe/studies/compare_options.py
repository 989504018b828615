"""Options of `compare`, apart from the settings of trainings: `--help` imports this module, so it imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass

from histopipe.system.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of `compare`."""

    resamples: int = setting(
        1000,
        "Bootstrap resamples of the patients for 95 % confidence intervals; 0 for none.",
        group="Options",
        at_least=0,
    )
