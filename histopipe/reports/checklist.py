"""Reporting checklists, filled with what a run knows: TRIPOD+AI and CLAIM.

Items are in our own words, under the numbers of the published checklists, which are cited.

Source:
    G. S. Collins et al., TRIPOD+AI statement, BMJ 385 (2024) e078378; A. S. Tejani et al., CLAIM: 2024 update,
    Radiology: Artificial Intelligence 6 (2024) e240300.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from histopipe._version import __version__
from histopipe.errors import UsageError
from histopipe.reports.run_facts import Fact, Facts

CHECKLISTS = ("tripod-ai", "claim")
ItemStatus = Literal["filled from the run", "partly", "for the authors"]
EMPTY = "________"
"""Field for the authors."""

REFERENCES = {
    "collins2024tripod": """@article{collins2024tripod,
  author = {Collins, Gary S. and Moons, Karel G. M. and Dhiman, Paula and others},
  title = {{TRIPOD+AI} statement: updated guidance for reporting clinical prediction models that use regression or machine learning methods},
  journal = {BMJ}, volume = {385}, pages = {e078378}, year = {2024}, doi = {10.1136/bmj-2023-078378}
}""",
    "tejani2024claim": """@article{tejani2024claim,
  author = {Tejani, Ali S. and Klontzas, Michail E. and Gatti, Anthony A. and others},
  title = {Checklist for Artificial Intelligence in Medical Imaging ({CLAIM}): 2024 Update},
  journal = {Radiology: Artificial Intelligence}, volume = {6}, number = {4}, pages = {e240300}, year = {2024},
  doi = {10.1148/ryai.240300}
}""",
    "newcombe2006auc": """@article{newcombe2006auc,
  author = {Newcombe, Robert G.},
  title = {Confidence intervals for an effect size measure based on the {Mann-Whitney} statistic. Part 2: asymptotic methods and evaluation},
  journal = {Statistics in Medicine}, volume = {25}, number = {4}, pages = {559--573}, year = {2006}, doi = {10.1002/sim.2324}
}""",
    "vancalster2019calibration": """@article{vancalster2019calibration,
  author = {Van Calster, Ben and McLernon, David J. and van Smeden, Maarten and Wynants, Laure and Steyerberg, Ewout W.},
  title = {Calibration: the {Achilles} heel of predictive analytics},
  journal = {BMC Medicine}, volume = {17}, pages = {230}, year = {2019}, doi = {10.1186/s12916-019-1466-7}
}""",
    "vickers2006decision": """@article{vickers2006decision,
  author = {Vickers, Andrew J. and Elkin, Elena B.},
  title = {Decision curve analysis: a novel method for evaluating prediction models},
  journal = {Medical Decision Making}, volume = {26}, number = {6}, pages = {565--574}, year = {2006},
  doi = {10.1177/0272989X06295361}
}""",
    "guo2017calibration": """@inproceedings{guo2017calibration,
  author = {Guo, Chuan and Pleiss, Geoff and Sun, Yu and Weinberger, Kilian Q.},
  title = {On calibration of modern neural networks},
  booktitle = {International Conference on Machine Learning}, pages = {1321--1330}, year = {2017}
}""",
    "histopipe": f"""@software{{histopipe,
  author = {{{{The histopipe maintainers}}}},
  title = {{histopipe: from whole-slide images to a trained model}}, version = {{{__version__}}}
}}""",
}
"""BibTeX entries by key."""
_CITED = {
    "newcombe2006auc": "Newcombe 2006", "vancalster2019calibration": "Van Calster et al. 2019",
    "vickers2006decision": "Vickers and Elkin 2006", "guo2017calibration": "Guo et al. 2017",
}  # fmt: skip
"""How the methods name papers, by key."""


@dataclass(frozen=True, slots=True)
class ChecklistItem:
    """An item of a checklist, with the facts of a run that answer it, or a part of it."""

    number: str
    section: str
    text: str
    status: ItemStatus
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Checklist:
    """A filled checklist. `cite` is a key of `REFERENCES`; `methods` is a paragraph for the section on methods."""

    name: str
    title: str
    cite: str
    items: tuple[ChecklistItem, ...]
    methods: str

    @property
    def references(self) -> tuple[str, ...]:
        """BibTeX entries of the checklist, the software, and the papers that the methods name."""
        named = [
            key
            for key, name in _CITED.items()
            if name in self.methods
            or any(name in fact.text for item in self.items for fact in item.facts)
        ]
        return tuple(REFERENCES[key] for key in (self.cite, "histopipe", *named))

    @property
    def summary(self) -> str:
        """Number of items by status."""
        counts = Counter(item.status for item in self.items)
        return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def fill(name: str, facts: Facts) -> Checklist:
    """Fill a checklist with the facts of a run.

    An item is filled if the run knows all that it asks for; partly, if it knows some; else it is for the authors.

    Raises:
        UsageError: there is no such checklist.
    """
    if name not in CHECKLISTS:
        raise UsageError("--checklist", found=repr(name), expected=" or ".join(CHECKLISTS))
    file = resources.files("histopipe.reports") / "checklists" / f"{name}.toml"
    value = tomllib.loads(file.read_text(encoding="utf-8"))
    items = []
    for entry in value["item"]:
        required, some = entry.get("run", []), entry.get("part", [])
        answers = tuple(facts[key] for key in (*required, *some) if key in facts)
        status: ItemStatus = "for the authors"
        if answers:
            status = (
                "filled from the run"
                if required and all(key in facts for key in required)
                else "partly"
            )
        items.append(
            ChecklistItem(entry["number"], entry["section"], entry["text"], status, answers)
        )
    return Checklist(
        value["name"], value["title"], value["cite"], tuple(items), methods_paragraph(facts)
    )


_SENTENCES = (
    "tiling", "encoding", "patch_selection", "preprocessing", "labels", "split", "split_level", "leaks", "network", "inputs", "outputs",
    "weights", "training", "augmentation", "imbalance", "selection", "threshold", "calibration", "predictions",
    "metric_names", "intervals", "software", "hardware",
)  # fmt: skip


def methods_paragraph(facts: Facts) -> str:
    """Return a paragraph for the section on methods, from what a run knows."""
    return " ".join(facts[key].text for key in _SENTENCES if key in facts)
