"""What a run found: sentences about participants and performance. None: the run does not know."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from histopipe.dataset.options import SIDES
from histopipe.evaluation.table import main_figure, number, with_ends, with_interval
from histopipe.reports.fact_texts import MOST, counted_names, listed
from histopipe.reports.judged import shown_levels
from histopipe.reports.run_data import RunData
from histopipe.runs import folder as run_folder
from histopipe.runs.result import METRICS


def _exclusions(run: RunData) -> str | None:
    texts = [
        f"{level}: {counted_names(own.excluded)}"
        for level, own in run.result.flow.items()
        if own.excluded
    ]
    return f"Excluded {'; '.join(texts)}" if texts else None


def _flow(run: RunData) -> str | None:
    texts = [
        f"{own.found:,} {level} found, {sum(own.excluded.values()):,} excluded, "
        + ", ".join(f"{count:,} {side}" for side, count in own.used.items())
        for level, own in run.result.flow.items()
    ]
    return "; ".join(texts) or None


def _split_sizes(run: RunData) -> str:
    counts = run.splits.get("counts", {})
    texts = [f"{side}: {counted_names(counts[side])}" for side in SIDES if counts.get(side)]
    return f"{run.config.unit.capitalize()} by class, {'; '.join(texts)}"


def _subgroup_columns(run: RunData) -> str | None:
    names = [it.column for it in run.result.breakdown.subgroups]
    return f"Metrics by {listed(names)}" if names else None


def _subgroup_results(run: RunData) -> str | None:
    texts = []
    for own in run.result.breakdown.subgroups:
        name, _ = next(iter(own.groups[0].figures.items()))
        groups = [
            f"{it.name} {with_ends(it.figures.get(name), it.intervals.get(name))} (n = {it.count})"
            for it in own.groups
        ]
        texts.append(f"{name.replace('_', ' ')} by {own.column}: {', '.join(groups)}")
    return "; ".join(texts) or None


def _shortcut(run: RunData) -> str | None:
    found = run.result.breakdown.shortcut
    if found is None:
        return None
    return (
        f"The origin of slides ({found.best}) predicts the label with a cross-validated AUC of {found.auc[found.best]:.3f} "
        f"(p = {found.p:.3f}, permutation)"
    )


def _test_set(run: RunData) -> str | None:
    test = run.result.metrics.get("test")
    return f"Held-out test set of {test.finest.patients} patients" if test else None


def _performance(run: RunData) -> str:
    texts = []
    for side, evaluation in run.result.metrics.items():
        for level, metrics in shown_levels(evaluation):
            name = next(iter(metrics.figures))
            text = f"{name.replace('_', ' ')} {with_interval(metrics, name)}"
            texts.append(f"{side}, {level.replace('_', ' ', 1)}: {text} (n = {metrics.count})")
    return "; ".join(texts)


def _accuracy(run: RunData) -> str | None:
    texts = []
    side, evaluation = run.judged.main
    for level, metrics in shown_levels(evaluation):
        for name in ("sensitivity", "specificity"):
            if metrics.figures.get(name) is not None:
                texts.append(
                    f"{side}, {level.replace('_', ' ', 1)}: {name} {with_interval(metrics, name)}"
                )
    return "; ".join(texts) or None


def _calibration(run: RunData) -> str | None:
    found = run.result.calibration
    if found is None:
        return None
    values = ", ".join(number(it) for it in found.temperature)
    return f"Temperature scaling on validation, temperature {values}"


def _characteristics(run: RunData) -> str | None:
    columns = dict.fromkeys(name for it in run.participants for name in it.cells)
    texts = []
    for column in columns:
        for side in SIDES:
            values = Counter(
                it.cells.get(column) or "missing" for it in run.participants if it.status == side
            )
            if values and len(values) <= MOST:
                texts.append(f"{column}, {side}: {counted_names(values)}")
    return "; ".join(texts) or None


def _failures(run: RunData) -> str | None:
    side, evaluation = run.judged.main
    for level, metrics in reversed(list(shown_levels(evaluation))):
        confusion: Sequence[Sequence[int]] = getattr(metrics, "confusion", ())
        wrong = sum(
            count for i, row in enumerate(confusion) for j, count in enumerate(row) if i != j
        )
        if confusion:
            return f"{side}, {level.replace('_', ' ', 1)}: {wrong} of {metrics.count} decisions are wrong; report.html lists them"
    return None


def _limitations(run: RunData) -> str:
    texts = [] if "test" in run.result.metrics else ["There is no test set"]
    texts += ["Only this data set was used", "Variation between seeds and splits was not measured"]
    notes = {
        note
        for it in run.result.metrics.values()
        for _, metrics in it.named()
        for note in metrics.notes
    }
    return "; ".join([*texts, *sorted(notes)])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hashes(run: RunData) -> str:
    return f"{'; '.join(hash_lines(run))}"


def hash_lines(run: RunData) -> Iterator[str]:
    """Yield the hash of the model, and the identifiers of the stores with the hash of the patches that were used."""
    model = run.folder / run_folder.MODEL
    if model.is_file():
        yield f"SHA-256 of {run_folder.MODEL}: {_sha256(model)}"
    slides = sorted((str(it["id"]), int(it["crc"])) for it in run.splits.get("slides", ()))
    digest = hashlib.sha256(repr(slides).encode()).hexdigest()
    yield f"stores {listed(run.splits.get('stores', ()))}, SHA-256 of slides and patch checksums: {digest}"


def _metric_names(run: RunData) -> str:
    names = dict.fromkeys(name.partition(":")[0] for name in run.judged.main[1].finest.figures)
    return listed([it.replace("_", " ") for it in names], most=30)


def _sites(run: RunData) -> str | None:
    counts = Counter(it.site for it in run.participants if it.site)
    return f"{len(counts)} sites: {counted_names(counts)} slides" if counts else None


def _scanners(run: RunData) -> str | None:
    counts = Counter(it.vendor for it in run.participants if it.vendor)
    return f"File formats of vendors: {counted_names(counts)}" if counts else None


def _scale(run: RunData) -> str | None:
    found = sorted(float(it.mpp) for it in run.participants if it.mpp)
    return f"Scanned at {found[0]:g} to {found[-1]:g} µm per pixel" if found else None


def _label_sources(run: RunData) -> str | None:
    counts = Counter(it.label_source for it in run.participants if it.label_source)
    return f"Labels from: {counted_names(counts)}" if counts else None


def _selection(run: RunData) -> str:
    title, _ = main_figure(run.judged.main[1].finest)
    return f"Epoch {run.result.best_epoch}, with the best validation {title}"


FACTS: dict[str, tuple[str, Callable[[RunData], str | None]]] = {
    "sites": (run_folder.SLIDES, _sites),
    "scanners": (run_folder.SLIDES, _scanners),
    "scale": (run_folder.SLIDES, _scale),
    "label_sources": (run_folder.SLIDES, _label_sources),
    "exclusions": (METRICS, _exclusions),
    "flow": (METRICS, _flow),
    "split_sizes": (run_folder.SPLITS, _split_sizes),
    "selection": (METRICS, _selection),
    "metric_names": (METRICS, _metric_names),
    "subgroup_columns": (METRICS, _subgroup_columns),
    "subgroup_results": (METRICS, _subgroup_results),
    "shortcut": (METRICS, _shortcut),
    "test_set": (METRICS, _test_set),
    "performance": (METRICS, _performance),
    "accuracy": (METRICS, _accuracy),
    "calibration": (METRICS, _calibration),
    "characteristics": (run_folder.SLIDES, _characteristics),
    "failures": (METRICS, _failures),
    "limitations": (METRICS, _limitations),
    "hashes": (f"{run_folder.MODEL}, {run_folder.SPLITS}", _hashes),
}
"""Sentence by name, with the file that it comes from."""
