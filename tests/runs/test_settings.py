"""Flags, checks, files, resume rules and docs/reference/settings.md agree with the declaration of each setting."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import pytest
import settings_table
from hypothesis import given, reject
from hypothesis import strategies as st

from helpers.paths import GOLDEN, PROJECT
from histopipe.cli.training import train as command
from histopipe.errors import UsageError
from histopipe.runs.defaults import DEFAULTS, NEW
from histopipe.runs.task_config import (
    CONFIGS,
    BagTrainConfig,
    PatchTrainConfig,
    changed_config,
    load_config,
    make_config,
)
from histopipe.runs.train import advise, chosen_settings, resumed_config, with_recipe
from histopipe.search.search_settings import SearchSettings
from histopipe.studies.study_settings import FoldSettings
from histopipe.system.settings import Setting, declared_settings, to_toml

ALL = declared_settings(*CONFIGS, FoldSettings, SearchSettings)

OLD_CONFIG = """
stores = ["a.lmdb", "b.lmdb"]
allow_extra_rows = false
model = "resnet50"
weights = "none"
epochs = 3
batch_size = 32
seed = 7
labels_from = "slide"
min_tissue = 0.5
min_focus = 0.0
exclude_pen = 1.0
exclude_dark = 1.0
split_by = "region"
fractions = [0.6, 0.2, 0.2]
region_um = 250.0
allow_leaks = false
optimizer = "adamw"
learning_rate = 0.001
weight_decay = 0.004
schedule = "constant"
warmup_steps = 0
clip_norm = 0.0
label_smoothing = 0.0
class_weights = "none"
dropout = 0.15
augment = ["flips", "colour"]
stain_norm = "none"
balance = "none"
max_per_slide = 0
shuffle_block = 0
on_error = "raise"
patience = 5
threshold = "youden"
top_k = 10
resamples = 1000
accumulate = 1
precision = "float32"
xla = false
save_minutes = 10.0
tensorboard = false
devices = "auto"
communication = "auto"
worker_timeout = 600.0
log_device_placement = false
deterministic = true
"""
"""Configuration file of version 0.1, with all settings of a training on patches that have a value."""


@pytest.mark.parametrize("page", settings_table.PAGES)
def test_pages_made_from_declarations_are_current(page: str) -> None:
    written = (PROJECT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert written == settings_table.PAGES[page](), "run `make docs`"


def test_every_training_setting_has_a_flag_with_its_help_text() -> None:
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    for name, declared in declared_settings(*CONFIGS, FoldSettings).items():
        if name != "stores":  # the argument
            assert declared.flag in options[name].opts
            assert declared.help in (options[name].help or "")
            assert options[name].is_flag == (declared.item_type is bool)


@pytest.mark.parametrize("declared", ALL.values(), ids=lambda setting: setting.name)
def test_defaults_are_valid_and_wrong_types_are_refused(declared: Setting) -> None:
    assert declared.help.endswith((".", ")"))
    if declared.default is not MISSING:
        declared.check(declared.default)
    wrong: dict[str, Any] = {f"{declared.name}: found <object": object()}
    if declared.item_type in (int, float) and not declared.is_list:
        named = declared.flag if declared.item_type is float else declared.name
        wrong |= {f"{named}: found nan": float("nan"), f"{declared.name}: found True": True}
    if declared.choices:
        value = ("nothing",) if declared.is_list else "nothing"
        wrong[f"{declared.name}: found .*'nothing'.*, expected"] = value
    for message, value in wrong.items():
        with pytest.raises(UsageError, match=f"^{message}"):
            declared.check(value)


def test_configuration_of_version_0_1_loads_unchanged(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(OLD_CONFIG)
    config = load_config(tmp_path / "config.toml")
    newer = {
        "trainable": "all",
        "head_copies": 0,
        "skip_bias_gradients": False,
        "patches_per_slide": 0,
        "time_budget": 0.0,
        "more_time": "",
        "layer_decay": 1.0,
        "allow_mismatch": False,
        "task": "classification",
        "target": [],
        "loss": "auto",
        "calibrate": False,
        "calibration_share": 0.2,
        "subgroup": [],
        "na": [],  # NA was a class
        "monitor": "metric",  # earlier versions chose the epoch by the AUC
        "annotated_area": "outlines",
        "annotation_origin": "auto",
        "frame": "auto",
        "mask_values": [],
    }
    assert tomllib.loads(to_toml(config)) == {**tomllib.loads(OLD_CONFIG), **newer}


@given(
    st.fixed_dictionaries(
        {"epochs": st.integers(1), "learning_rate": st.floats(1e-300, 1.0)},
        optional={
            "labels": st.text(min_size=1),
            "target": st.lists(st.text(min_size=1), min_size=1, max_size=1),
            "na": st.lists(st.text()),
            "subgroup": st.lists(st.text(min_size=1), unique=True),
            "augment": st.just(["none"]) | st.just(["flips", "colour"]),
            "region": st.floats(1.0, 1e9),
            "deterministic": st.booleans(),
            "seed": st.integers(0, 2**31),
        },
    ),
    st.sampled_from(["stores", "mil"]),
    st.lists(st.text(min_size=1), min_size=1),
)
def test_configurations_are_read_as_written(
    settings: dict[str, Any], source: str, sources: list[str]
) -> None:
    """Any text, number and list survives config.toml."""
    if source == "mil":
        settings = {
            name: value for name, value in settings.items() if name not in ("augment", "region")
        }
    try:
        config = make_config({**settings, source: sources})
    except UsageError:
        reject()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        assert load_config(path) == config


def test_bag_settings_have_a_separate_class() -> None:
    bags = make_config({"mil": Path("features"), "fractions": [0.5, 0.25, 0.25]})
    earlier = load_config(GOLDEN / "2026-11-25" / "bags" / "config.toml")
    resumed = resumed_config({"mil": ["f"], "epochs": 2, "task": "classification"}, {"epochs": 3})
    for config, settings in (
        (bags, ("standard", "loss")),
        (earlier, ("none", "metric")),
        (resumed, ("none", "metric")),
    ):
        assert isinstance(config, BagTrainConfig)
        assert (config.feature_scaling, config.monitor) == settings
    assert (bags.batch_size, bags.learning_rate, resumed.epochs) == (
        4,
        DEFAULTS["bags"][NEW]["learning_rate"],
        3,
    )
    assert "stores" not in tomllib.loads(to_toml(bags))
    assert make_config({"mil": None}) == PatchTrainConfig()
    # Patch settings that are switched off are accepted.
    assert make_config({"mil": "f", "augment": ("none",), "model": "small-cnn"}).unit == "bags"
    for wrong, expected in (
        ({"mil": "f", "model": "resnet50"}, "--model: found --mil f, expected patches"),
        ({"mil": "f", "stores": ("a",)}, "STORES: found --mil f"),
        ({"pooling": "max"}, "--pooling: found no --mil, expected --mil with a folder"),
        (
            {"mil": "f", "split_by": "patch"},
            "--split-by patch divides slides, and --mil trains on whole slides",
        ),
        ({"colour": 3}, "unknown settings: found colour, expected accumulate, "),
    ):
        with pytest.raises(UsageError, match=expected):
            make_config(wrong)


def test_resume_changes_only_settings_declared_for_it() -> None:
    recorded = {"stores": ["a.lmdb"], "epochs": 3, "seed": 2, "task": "classification"}
    same: dict[str, Any] = {"stores": ("a.lmdb",), "seed": 2}
    assert resumed_config(recorded, same | {"epochs": 9}).epochs == 9
    refused = "only --out and .*--epochs"
    for change, message in (
        ({"seed": 3}, refused),
        ({"stores": ["b.lmdb"]}, refused),
        ({"mil": "features"}, refused),
        ({"colour": 3}, "unknown settings"),
    ):
        with pytest.raises(UsageError, match=message):
            resumed_config(recorded, change)


def test_changed_settings_are_checked_together() -> None:
    config = PatchTrainConfig(shuffle_block=8)
    with pytest.raises(UsageError, match="--shuffle-block reads neighbouring patches"):
        changed_config(config, balance="slide")
    assert changed_config(config, epochs=4) == PatchTrainConfig(shuffle_block=8, epochs=4)


# Settings that are left out.


def test_recipe_follows_the_size_of_the_patches(small_store: Path, made_store: Path) -> None:
    assert chosen_settings({"stores": (str(small_store),)}) == {"model": "small-cnn"}
    chosen = chosen_settings({"stores": (str(made_store),)})
    assert chosen.pop("model") == "efficientnet-lite0"
    by_name = chosen_settings({"model": "efficientnet-lite0", "stores": ("missing.lmdb",)})
    assert by_name == chosen and 0 < chosen["learning_rate"] < 1e-3
    settings = {"stores": (str(made_store),), "learning_rate": 0.5}
    assert with_recipe(settings) == {**settings, **chosen_settings(settings)}
    assert "learning_rate" not in chosen_settings(settings)
    assert chosen_settings({"model": "resnet50"}) == chosen_settings({"mil": "features"}) == {}


@pytest.mark.parametrize(
    ("settings", "fine_tuned"),
    [
        ({"model": "efficientnet-lite1"}, True),
        ({"model": "efficientnet-lite1", "weights": "none"}, False),
        ({"model": "efficientnet-lite1", "trainable": "head"}, False),
        ({"model": "resnet50", "weights": "imagenet"}, True),
        ({"model": "resnet50", "weights": "imagenet", "trainable": "last:2"}, True),
        ({"model": "resnet50", "weights": "imagenet", "trainable": "lora:4"}, False),
        ({"model": "resnet50"}, False),
    ],
)
def test_recipe_lowers_the_rate_of_trained_weights(
    settings: dict[str, Any], fine_tuned: bool
) -> None:
    assert ("learning_rate" in chosen_settings(settings)) is fine_tuned


@pytest.mark.parametrize("name", ["learning_rate", "epochs"])
@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({}, "new"),
        *(({"weights": "imagenet", "trainable": kind}, kind) for kind in ("all", "head")),
        ({"weights": "imagenet", "trainable": "last:3"}, "last:N"),
        ({"weights": "imagenet", "trainable": "lora:8"}, "lora:R"),
        ({"mil": "f"}, "new"),
        *(
            ({"mil": "f", "weights": "runs/a", "trainable": kind}, kind)
            for kind in ("all", "pooling", "head")
        ),
    ],
)
def test_help_names_the_default_that_is_used(
    settings: dict[str, Any], trained: str, name: str
) -> None:
    (option,) = (each for each in command.params if each.name == name)
    text = getattr(option, "help", "")
    match = re.search(
        r"default: auto: (\S+) from trained weights with --trainable (.+), else (\S+); on bags: (\S+)\]",
        text,
    )
    assert match
    of_trained, trainable, of_others, of_bags = match.groups()
    fine_tuned = trained in trainable.split(" or ")
    expected = of_bags if "mil" in settings else of_trained if fine_tuned else of_others
    model = {} if "mil" in settings else {"model": "resnet50"}
    assert getattr(make_config(with_recipe({**model, **settings})), name) == float(expected)


def test_recorded_settings_take_the_place_of_the_recipe() -> None:
    before = {"model": "small-cnn", "weights": "none", "epochs": 20, "task": "classification"}
    expected = {"model": "small-cnn", "weights": "none", "epochs": 3}
    assert expected.items() <= with_recipe({"epochs": 3}, before).items()


@pytest.mark.parametrize(
    ("settings", "row", "patients", "expected"),
    [
        ({"model": "small-cnn"}, (0.8, 0.7), 30, "--model efficientnet-lite0"),
        ({"model": "small-cnn"}, (0.97, 0.95), 30, ""),
        ({"model": "resnet50"}, (0.97, 0.95), 4, "more than 4 patients, and --folds"),
        ({"model": "resnet50"}, (0.97, 0.55), 30, "near chance (auc 0.55)"),
        ({"model": "resnet50"}, (0.97, 0.80), 30, "auc 0.97 in training, 0.80 in validation"),
        ({"model": "resnet50", "epochs": 3}, (0.8, 0.8), 30, "--resume --epochs 6"),
        (
            {"model": "resnet50", "epochs": 3, "splits": "fold"},
            (0.8, 0.8),
            30,
            "train longer (--epochs 6)",
        ),
        ({"model": "resnet50", "epochs": 3}, (1.0, 1.0), 30, ""),
        ({"model": "resnet50"}, (0.97, 0.95), 1, "more than 1 patient, and"),
        ({"model": "resnet50", "epochs": 4}, (0.8, 0.8), 30, ""),
        ({"mil": ("f",)}, (0.6, 0.5), 30, "features of another encoder"),
    ],
)
def test_advice_names_what_to_try(
    settings: dict[str, Any], row: tuple[float, float], patients: int, expected: str
) -> None:
    rows = [{"epoch": n, "auc": row[0], "val_auc": row[1]} for n in (1, 2, 3)]
    advice = advise(make_config(settings), rows, 3, patients)
    assert expected in advice and bool(advice) == bool(expected)


def test_advice_names_a_subset_with_less_than_half_of_its_share() -> None:
    rows = [{"epoch": n, "auc": 0.97, "val_auc": 0.95} for n in (1, 2, 3)]
    advice = advise(make_config({"model": "resnet50"}), rows, 2, 30, ["test has 3 of 900 patches"])
    assert advice.startswith("to improve: split with another --seed")
    assert advice.endswith("test has 3 of 900 patches")
