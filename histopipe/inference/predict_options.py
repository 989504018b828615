"""How slides are to be predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histopipe.dataset.options import OnError
from histopipe.errors import UsageError
from histopipe.evaluation.scores import Aggregation
from histopipe.geometry import Mpp
from histopipe.inference.classifier import Classifier
from histopipe.slides.scale import check_mpp
from histopipe.system.progress import message
from histopipe.tiling.spec import TilingSpec, spec_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """How slides are predicted.

    Attributes:
        batch_size: patches at once, over all devices.
        devices: as for training.
        aggregate: how patches are put together to slides and patients.
        labels: a labels file; the recorded ones of a store if not given.
        allow_extra_rows: ignore its rows, and those of `mpp_csv`, that name no slide.
        on_error: "skip" leaves out patches that are damaged in a store.
        tiling: of slides' files: settings of a `TilingSpec` that are to be others than in training.
        mpp_csv, default_mpp: scales of slides' files that do not say theirs.
        max_unreadable: share of the patches of a slide's file that may be lost to damage.
        workers: processes that read slides' files.
    """

    batch_size: int = 64
    devices: str = "auto"
    aggregate: Aggregation = "mean"
    labels: Path | None = None
    allow_extra_rows: bool = False
    on_error: OnError = "raise"
    tiling: Mapping[str, Any] = field(default_factory=dict)
    mpp_csv: Path | None = None
    default_mpp: float | None = None
    max_unreadable: float = 0.01
    workers: int | None = None

    @property
    def mpp(self) -> Mpp | None:
        """The default scale.

        Raises:
            UsageError: no slide has such a scale.
        """
        return None if self.default_mpp is None else check_mpp("--default-mpp", self.default_mpp)

    def check_for_stores(self) -> None:
        """Refuse what says how slides' files are read where none are.

        Raises:
            UsageError: something is given.
        """
        plain = PredictOptions()
        of_files = ("tiling", "mpp_csv", "default_mpp", "max_unreadable", "workers")
        given = [name for name in of_files if getattr(self, name) != getattr(plain, name)]
        if given:
            name = next(iter(self.tiling), given[0]) if given[0] == "tiling" else given[0]
            raise UsageError(
                f"--{name.replace('_', '-')}", found="a store", expected="slides: a store's patches are made",
                todo="leave it out",
            )  # fmt: skip


def files_spec(classifier: Classifier, options: PredictOptions) -> TilingSpec:
    """How slides' files are tiled: as the patches of the training were, as far as that can be said of other slides.

    Raises:
        UsageError: it is not known how they were.
    """
    spec = classifier.spec
    if spec is None:
        raise UsageError(
            f"{classifier.folder} does not say how its patches were made, and its store is gone",
            todo="ingest the slides as those of the training were, and predict from the store",
        )
    tiling = dict(options.tiling)
    algorithms = spec.get("algorithms")
    if isinstance(algorithms, Mapping) and algorithms.get("grid") == "imported-1":
        message(
            "the training's patches were chosen by another tool: here, all with tissue are predicted"
        )
        tiling.setdefault("tissue", "otsu")
    if spec.get("roi") is not None:
        message(
            f"the training's patches were of the region {spec['roi']!r}: here, all with tissue are predicted"
        )
    return spec_from_json(spec, **tiling)
