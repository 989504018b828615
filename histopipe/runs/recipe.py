"""Settings that a user left out, chosen from the data and the network by simple rules: the recipe of a training.

A recipe is resolved once: `config.toml` of a run, of a cross-validation and of a search holds its values. The rules were
decided by measurement; see `docs/design/recipes.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from histopipe.dataset.selection import store_paths
from histopipe.runs.task_config import CONFIGS, FORMER, PatchTrainConfig
from histopipe.store.store import Store
from histopipe.system.output import message
from histopipe.system.settings import declared_settings, select_settings

LITE, SMALL_CNN = "efficientnet-lite0", "small-cnn"
SMALLEST_TRAINED = 96
"""Side of the smallest patches, in pixels, for which a network with trained weights is the default."""
_FINE_TUNING: Mapping[str, Any] = {"learning_rate": 3e-4, "epochs": 10}
"""Settings for the training of a network from trained weights."""


def default_model(patch_size: int) -> str:
    """Return the network for patches of this side in pixels, if the user names none."""
    return LITE if patch_size >= SMALLEST_TRAINED else SMALL_CNN


def chosen_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the recipe adds to those of a user.

    Raises:
        HistopipeError: there is no store, or it cannot be opened.
    """
    if settings.get("mil") is not None:
        return {}
    chosen = {}
    if settings.get("model") is None:
        stores = settings.get("stores") or declared_settings(PatchTrainConfig)["stores"].default
        with Store(store_paths(stores)[0]) as store:
            chosen["model"] = default_model(store.patch_size)
    is_lite = str({**settings, **chosen}["model"]).startswith("efficientnet-lite")
    untrained = ("none",) if is_lite else ("none", "auto")
    # A new last layer, or low-rank updates, are as far from their best values as a new network.
    if settings.get("weights", "auto") not in untrained and settings.get(
        "trainable", "all"
    ).startswith(("all", "last")):
        chosen |= _FINE_TUNING
    return {name: value for name, value in chosen.items() if name not in settings}


def with_recipe(
    settings: Mapping[str, Any], recorded: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return settings with those of the recipe, and report these.

    Args:
        settings: settings by name.
        recorded: all settings that a study began with. They take the place of the recipe and of defaults.

    Raises:
        HistopipeError: as `chosen_settings`.
    """
    if recorded is not None:
        kind = CONFIGS[settings.get("mil") is not None]
        return {**FORMER, **select_settings(recorded, kind), **settings}
    chosen = chosen_settings(settings)
    if chosen:
        texts = [f"{name.replace('_', ' ')} {value}" for name, value in chosen.items()]
        message(f"settings by default: {', '.join(texts)}")
    return {**settings, **chosen}
