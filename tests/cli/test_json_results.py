"""Test that the output of every command with `--json` has a schema; `run` compares the output of all tests with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import json_schemas
import jsonschema
import pytest

from helpers.click_commands import click_command
from helpers.commands import run_command
from helpers.json_results import check_json, schemas
from helpers.paths import GOLDEN
from histopipe.cli import COMMANDS


def test_every_command_with_json_has_a_schema() -> None:
    with_json = set()
    for name in COMMANDS:
        flags = {flag for parameter in click_command(name).params for flag in parameter.opts}
        if "--json" in flags:
            with_json |= {name, f"{name} --plan"} if "--plan" in flags else {name}
    assert schemas().keys() == with_json
    assert schemas() == json_schemas.schemas(), "run tools/json_schemas.py"
    for name, schema in schemas().items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["description"] and schema["type"] == "object", name
        assert schema.keys() & {"required", "additionalProperties", "anyOf"}, name


def test_other_forms_are_refused() -> None:
    check_json(("init",), "{}")
    for text in ("{}", '{"file": 5, "commands": []}'):
        with pytest.raises(jsonschema.ValidationError):
            check_json(("init", "--json"), text)


def test_results_of_short_commands(tmp_path: Path) -> None:
    """Those that no other test calls with `--json`."""
    (tmp_path / "slides").mkdir()
    shutil.copy(GOLDEN / "slides" / "slide-000.svs", tmp_path / "slides")
    shutil.copytree(GOLDEN / "store-v1", tmp_path / "store.lmdb")
    (tmp_path / "table.csv").write_text("slide,grade\nslide-000,2\n")
    for words in (
        ("init", "--json"),
        ("cohort", "table.csv", "slides", "--label", "grade", "--json"),
        ("tissue", "slides", "--json"),
        ("stains", "store.lmdb", "--json"),
        ("report", "store.lmdb", "--no-pictures", "--json"),
        ("export", GOLDEN / "store-v1", "--index", "csv", "--out", "index.csv", "--json"),
    ):
        done = run_command(*words, cwd=tmp_path)  # none of them loads TensorFlow
        assert done.returncode in (0, 3), done.stderr  # a slide has too little stain
        assert json.loads(done.stdout)
