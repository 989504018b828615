"""Model card of a run: what the model is, what it was trained and tested on, and what nobody but the author knows.

Source:
    M. Mitchell et al., Model cards for model reporting, FAT* (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from histopipe.reports.checklist import EMPTY
from histopipe.reports.run_facts import Facts
from histopipe.system.files import write_atomically

MODEL_CARD = "model-card.md"
_SECTIONS: Sequence[tuple[str, Sequence[str], bool]] = (
    ("Model", ("network", "inputs", "outputs", "weights", "training", "augmentation", "software", "hashes"), False),
    ("Intended use", (), True),
    ("Data", ("flow", "exclusions", "participants_by_label", "sites", "scanners", "scale", "tiling", "encoding",
              "preprocessing", "patch_selection", "labels", "label_sources", "characteristics", "split", "split_level",
              "split_sizes"), True),
    ("Metrics", ("performance", "leaks", "accuracy", "threshold", "calibration", "recalibrated", "metric_names", "intervals"), False),
    ("Subgroups", ("subgroup_results", "heterogeneity", "shortcut"), False),
    ("Limits", ("limitations", "failures"), True),
    ("Licence and contact", (), True),
)  # fmt: skip
"""Title, facts, and whether the author has something to add."""


def write_model_card(path: Path, facts: Facts, *, name: str) -> None:
    """Write the model card by one rename. Fields that a run cannot know are left empty."""
    lines = [f"# Model card: {name}", ""]
    for title, keys, open_field in _SECTIONS:
        lines += [f"## {title}", ""]
        for key in keys:
            if key in facts:
                lines.append(f"- {facts[key].text} [{facts[key].source}]")
        if open_field:
            lines.append(f"- For the author: {EMPTY}")
        lines.append("")
    write_atomically(path, "\n".join(lines))
