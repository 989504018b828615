"""What commands print with `--json`, compared with the documented schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema

from helpers.paths import PROJECT

SCHEMAS = PROJECT / "docs" / "reference" / "json-schemas.json"


@cache
def schemas() -> dict[str, Any]:
    """Return the schema of each command, by its name."""
    definitions: dict[str, Any] = json.loads(SCHEMAS.read_text())["$defs"]
    return definitions


def check_json(arguments: Sequence[object], text: str) -> None:
    """Assert that the output of a command with `--json` has the documented form."""
    flags = [*map(str, arguments)]  # after the command
    if "--json" in flags and text.startswith("{"):
        plan = " --plan" if "--plan" in flags else ""
        jsonschema.validate(json.loads(text), schemas()[flags[0] + plan])
