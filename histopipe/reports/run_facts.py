"""Facts of a finished run, in sentences for a checklist or a model card, each with the file that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from histopipe.reports import data_facts, method_facts, result_facts
from histopipe.reports.run_data import RunData


class Fact(NamedTuple):
    """A sentence, and the file or files that it comes from."""

    text: str
    source: str


Facts = Mapping[str, Fact]


def facts_of(run: RunData) -> Facts:
    """Return the facts that a run knows, by name. Names of facts that it cannot know are missing."""
    facts = {}
    for name, (source, make) in (
        data_facts.FACTS | method_facts.FACTS | result_facts.FACTS
    ).items():
        text = make(run)
        if text:
            facts[name] = Fact(text, source)
    return facts
