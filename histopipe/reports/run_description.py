"""The description of a finished run, from which templates make sentences.

`describe_run` returns one nested dict. The statements in `templates/statements.j2` are sentences with its values, and
checklists, methods and model card are made of statements. All that needs code is done here: counting, choosing, and
plurals. What a run does not know is None or empty.

| part | contents | files |
| --- | --- | --- |
| `config`, `task` | settings, and what is predicted | `config.toml` |
| `result` | epochs, duration, temperature | `metrics.json` |
| `slides` | numbers by site, scanner and source of the label, scales, patients, columns of the labels | `slides.csv` |
| `flow`, `excluded` | participant flow, reasons of exclusion | `metrics.json` |
| `tiling`, `encoding` | what the store recorded on its patches | `metrics.json`, `slides.csv` |
| `split` | how the data were divided, and sizes of the parts | `splits.json`, `slides.csv` |
| `patches` | selection of patches, network, augmentation; None for bags | `config.toml` |
| `model`, `training` | inputs, weights, software; machine and settings of the training | `metrics.json`, `config.toml` |
| `threshold`, `evaluation` | rule of the threshold; metrics, failures, limitations | `config.toml`, `metrics.json` |
| `sample` | patients for each covariate, expected interval, follow-up | `slides.csv`, `metrics.json` |
| `breakdown` | metrics by subgroup, differences, shortcut | `metrics.json` |
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from histopipe.evaluation.evaluate import main_metric, metric_title, remarks
from histopipe.evaluation.subgroups import AUTOMATIC, NoValue, group_name
from histopipe.reports.evaluation_blocks import (
    column_title,
    list_temperature_effects,
    sentences,
    shown_levels,
    units_of,
)
from histopipe.reports.failures import survival_text
from histopipe.runs import folder as run_folder
from histopipe.runs.config import MODEL, OPTIMIZATION, SAMPLING
from histopipe.runs.defaults import parse_trainable
from histopipe.runs.run import Run
from histopipe.runs.task_config import PatchTrainConfig
from histopipe.splits.slide_table import SlideEntry
from histopipe.system.files import file_sha256
from histopipe.system.grouping import grouped, grouped_values
from histopipe.system.output import counted, listed
from histopipe.system.settings import declared_settings
from histopipe.system.table_cells import FLAGS, cell_number, is_number
from histopipe.tasks.choices import SUBSETS, Subset
from histopipe.tasks.intervals import expected_interval
from histopipe.tasks.metrics import Metrics
from histopipe.tasks.predictions import EVEN, check_rule
from histopipe.tasks.task import Task

SUBSET_NAMES: Mapping[Subset, str] = {
    "train": "training",
    "validation": "validation",
    "test": "test",
    "calibration": "calibration of prediction sets",
}
OTHER_DATA_UNKNOWN = "Performance on slides from another hospital, scanner or stain is unknown"
_SOFTWARE = {
    "histopipe": "histopipe",
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "python": "Python",
}
_AUGMENTATIONS = {
    "flips": "flips and rotations",
    "crop": "random crops",
    "stain": "changes of the stain",
    "colour": "changes of the colour",
}
_CHOSEN = (MODEL, OPTIMIZATION, SAMPLING)
"""Groups of settings that may be chosen by results."""
_MOST = 12
"""Most different values of a column that are listed. Columns with more values, such as names, identify slides."""


def describe_run(run: Run) -> dict[str, Any]:
    """Return the description of a run: the parts in the docstring of this module, by name."""
    rule = check_rule(run.config.threshold).groupdict()
    if "validation" not in run.result.metrics:
        rule["fixed"] = rule["fixed"] or f"{EVEN}"
    return {
        "config": run.config,
        "task": run.evaluated.task,
        "result": run.result,
        "added": next(iter(sentences([run.result.added_text(run.evaluated.main[0])])), "")[:-1],
        "slides": _describe_slides(run),
        "flow": {
            level: {
                "found": numbers.total,
                "excluded": sum(numbers.excluded.values()),
                "used": [
                    f"{count:,} {'is' if count == 1 else 'are'} in "
                    f"{' and '.join(SUBSET_NAMES[subset] for subset in subsets)}"
                    for subsets, count in numbers.used.items()
                ],
            }
            for level, numbers in run.result.flow.items()
        },
        "excluded": {
            level: numbers.excluded
            for level, numbers in run.result.flow.items()
            if numbers.excluded
        },
        **_describe_store(run),
        "split": _describe_split(run),
        "patches": _describe_patches(run),
        "model": _describe_model(run),
        "training": _describe_training(run),
        "threshold": {**rule, "end": "highest" if rule["of"] == "sensitivity" else "lowest"},
        "evaluation": _describe_evaluation(run),
        "sample": _describe_sample(run),
        "breakdown": _describe_breakdown(run),
    }


def _describe_slides(run: Run) -> dict[str, Any]:
    slides = run.slides
    counts = {
        column: Counter(sorted(filter(None, (slide.value(column) for slide in slides))))
        for column in ("site", "vendor", "label_source")
    }
    scales = sorted({float(slide.value("mpp")) for slide in slides if slide.value("mpp")})
    return {
        **counts,
        "scales": list(dict.fromkeys(f"{scale:g}" for scale in [*scales[:1], *scales[-1:]])),
        "patients": _describe_patients(run),
        "characteristics": _describe_characteristics(slides),
    }


def _describe_patients(run: Run) -> dict[str, str]:
    """Return the patients of each subset, by class, or with their events or labels; empty if these are not known."""
    task, used = run.evaluated.task, [slide for slide in run.slides if slide.subsets]
    annotated = getattr(run.config, "labels_from", "") == "annotation"
    if annotated or any(name not in slide.cells for slide in used for name in task.flags):
        return {}
    texts = {}
    for subset in SUBSETS:
        of_subset = (slide for slide in used if subset in slide.subsets)
        patients = grouped(of_subset, lambda slide: slide.patient)
        if patients:
            texts[SUBSET_NAMES[subset]] = _outcomes(task, list(patients.values()))
    return texts


def _describe_sample(run: Run) -> dict[str, Any]:
    """Return patients of the rarest outcome for each input of covariates, and the expected interval of an AUC of 0.8."""
    task, evaluation = run.evaluated.task, run.evaluated.main[1]
    columns = run.metrics_file.get("covariates") or ()
    inputs = sum(len(column["categories"]) or 1 for column in columns)
    trained = (slide for slide in run.slides if "train" in slide.subsets)
    patients = [*grouped(trained, lambda slide: slide.patient).values()]
    complete = all(name in slide.cells for name in task.flags for p in patients for slide in p)
    fewest = min(_count_outcomes(task, patients).values(), default=0) if complete else 0
    of_patients = evaluation.patient.get("mean") or evaluation.finest
    counts = [*of_patients.outcomes.values()]
    ends = expected_interval(*counts) if task.positive is not None and len(counts) == 2 else None
    return {
        "inputs": inputs,
        "fewest": fewest,
        "per_input": fewest / inputs if inputs and fewest else None,
        "tested": [f"{n:,} patients of {name}" for name, n in of_patients.outcomes.items()],
        "expected": ends and f"{ends[0]:.2f} to {ends[1]:.2f}",
        "survival": survival_text(SUBSET_NAMES[run.evaluated.main[0]].capitalize(), of_patients),
    }


def _count_outcomes(task: Task, patients: Sequence[Sequence[SlideEntry]]) -> dict[str, int]:
    """Return the number of patients by class, or with the event or each label."""
    if task.of_classes:
        labels = [{slide.label for slide in slides} for slides in patients]
        counts = Counter("several labels" if len(names) > 1 else names.pop() for names in labels)
        return dict(sorted(counts.items()))
    return {
        name: sum(
            any(
                FLAGS.get(slide.cells[name].lower(), cell_number(slide.cells[name])) == 1
                for slide in slides
            )
            for slides in patients
        )
        for name in task.flags
    }


def _outcomes(task: Task, patients: Sequence[Sequence[SlideEntry]]) -> str:
    """Return the number of patients by class, or of all with the number of events or of each label."""
    happened = _count_outcomes(task, patients)
    if task.of_classes:
        return list_counts(happened, "{1:,} {0}")
    return " with ".join(filter(None, (f"{len(patients):,}", task.flag_counts(happened))))


def list_counts(counts: Mapping[str, int], form: str, most: int = 12) -> str:
    """Return counts by name as a list, each in a form such as "{0} ({1:,})"; `most` as for `listed`."""
    return listed([form.format(name, count) for name, count in counts.items()], most)


def _describe_characteristics(slides: Sequence[SlideEntry]) -> dict[str, dict[str, str]]:
    """Return the further columns of the labels file by subset: counts, or median and range of numbers."""
    columns = {}
    for column in dict.fromkeys(name for slide in slides for name in slide.cells):
        by_subset = {
            subset: [slide.cells.get(column, "") for slide in slides if subset in slide.subsets]
            for subset in SUBSETS
        }
        values = {cell for cells in by_subset.values() for cell in cells if cell}
        if len(values) <= _MOST or all(map(is_number, values)):
            summarize = _range_of if len(values) > _MOST else _counts_of
            columns[column] = {
                SUBSET_NAMES[subset]: summarize(cells)
                for subset, cells in by_subset.items()
                if cells
            }
    return columns


def _range_of(cells: Sequence[str]) -> str:
    numbers = np.array([float(cell) for cell in cells if cell])
    missing = len(cells) - len(numbers)
    texts = [f"{missing} missing"] if missing else []
    if len(numbers):
        ends = f"from {numbers.min():.4g} to {numbers.max():.4g}"
        texts = [f"median {np.median(numbers):.4g}", ends, *texts]
    return ", ".join(texts)


def _counts_of(cells: Sequence[str]) -> str:
    return list_counts(
        Counter(sorted(group_name(cell or NoValue.MISSING) for cell in cells)),
        "{1} × {0}",
        _MOST + 1,
    )


def _describe_store(run: Run) -> dict[str, Any]:
    """Return `tiling` and `encoding`: None for features, and for patches of unknown stores."""
    spec = run.metrics_file.get("spec")
    if not isinstance(spec, dict):
        return {"tiling": None, "encoding": None}
    routes = {slide.value("route") for slide in run.slides} - {""}
    tiling = {
        "side": spec.get("patch_size"),
        "scale": f"{spec['mpp']:g} µm per pixel"
        if spec.get("mpp")
        else f"level {spec.get('level')}",
        "overlap": spec.get("overlap"),
        "moved": spec.get("edge") == "shift",
        "padded": spec.get("edge") == "pad",
        "without_tissue": spec.get("tissue") == "none",
        "algorithm": (spec.get("algorithms") or {}).get("tissue") or spec.get("tissue"),
        "tissue_threshold": spec.get("tissue_threshold") or 0,
    }
    encoding = {
        "lossless": spec.get("codec") == "png",
        "copied": routes == {"copy"},
        "quality": spec.get("quality"),
    }
    return {"tiling": tiling, "encoding": encoding if routes else None}


def _describe_split(run: Run) -> dict[str, Any]:
    splits, by, config = run.splits, run.splits.split_by, run.config
    balanced, checksums = (
        splits.algorithm == "balanced",
        sorted((s.id, int(s.crc)) for s in splits.slides),
    )
    subset_counts = splits.count() if run.evaluated.task.of_classes else {}
    crossing = {}
    if by not in ("region", "patch"):
        for what in ("patient", "site", "slide"):
            subsets = grouped_values(
                (slide.value(what), subset) for slide in run.slides for subset in slide.subsets
            )
            crossing[what] = sum(len(set(names)) > 1 for value, names in subsets.items() if value)
    return {
        "of_cross_validation": run_folder.is_cross_validation(run.folder.resolve().parent),
        "column": splits.column,
        "balanced": balanced,
        "seed": splits.seed,
        "shares": {
            SUBSET_NAMES[subset]: percent(share)
            for subset, share in zip(SUBSETS, splits.fractions, strict=False)
            if share
        },
        "strata": [*([f"{by}s", config.unit] if balanced else []), config.task_type.stratum],
        "region_um": getattr(config, "region_um", 0) if by == "region" else None,
        "of_patches": by == "patch",
        # Runs of earlier versions have no table of slides.
        "unknown": by if crossing and not run.slides else None,
        "crossing": [
            counted(count, what)
            for what, count in crossing.items()
            if count and (what != "site" or by == "site")
        ],
        "disjoint": by if run.slides and crossing.get(by) == 0 else None,
        "counts": {
            SUBSET_NAMES[subset]: subset_counts[subset]
            for subset in SUBSETS
            if subset_counts.get(subset)
        },
        "stores": splits.uuids,
        "digest": hashlib.sha256(repr(checksums).encode()).hexdigest(),
    }


def percent(share: float) -> str:
    """Return a share as a percentage, such as `50 %`."""
    return f"{100 * share:.3g} %"


def _describe_patches(run: Run) -> dict[str, Any] | None:
    config = run.config
    if not isinstance(config, PatchTrainConfig):
        return None
    bounds = {
        f"at least {percent(config.min_tissue)} tissue": config.min_tissue > 0,
        f"a focus of at least {config.min_focus:g}": config.min_focus > 0,
        f"at most {percent(config.exclude_pen)} pen marks": config.exclude_pen < 1,
        f"at most {percent(config.exclude_dark)} folds or black": config.exclude_dark < 1,
    }
    encoder = next(iter(run.metrics_file.get("encoders") or ()), None) or {}
    stain_norm = encoder.get("stain_norm", config.stain_norm)
    return {
        "annotated": config.labels_from == "annotation",
        "stain_norm": None if stain_norm == "none" else stain_norm,
        "bounds": [text for text, is_set in bounds.items() if is_set],
        "network": Path(config.model).name,
        "trained": dict([parse_trainable(config.trainable)]),
        "augmentations": [_AUGMENTATIONS[name] for name in config.augment if name != "none"],
    }


def _describe_model(run: Run) -> dict[str, Any]:
    metrics, config, file = run.metrics_file, run.config, run.folder / run_folder.MODEL
    mpp, weights = metrics.get("patch_mpp"), getattr(config, "used_weights", "none")
    versions = {**metrics.get("environment", {}), **metrics}
    return {
        "bag": getattr(config, "bag", "slide"),
        "mpp": mpp if isinstance(mpp, int | float) else None,
        "covariates": getattr(config, "covariates", ()),
        "encoders": [
            str((encoder or {}).get("encoder") or "an unknown encoder")
            for encoder in metrics.get("encoders") or ()
        ],
        "weights": None if weights == "none" else Path(weights).name,
        "software": [
            f"{title} {versions[name]}" for name, title in _SOFTWARE.items() if versions.get(name)
        ],
        "digest": file_sha256(file) if file.is_file() else None,
    }


def _describe_training(run: Run) -> dict[str, Any]:
    config, environment = run.config, run.metrics_file.get("environment", {})
    best = f"best {main_metric(run.evaluated.main[1].finest)[0]}"
    return {
        "weight_decay": config.weight_decay if config.optimizer == "adamw" else None,
        "sample": "patch" if config.unit == "patches" else "bag",
        "class_weights": config.class_weights != "none",
        "balance": None if config.balance == "none" else config.balance,
        "cores": environment.get("cores"),
        "gpus": environment.get("gpus"),
        "changed": [
            f"{name.replace('_', ' ')} {value}"
            for name, declared in declared_settings(type(config)).items()
            if declared.group in _CHOSEN and (value := getattr(config, name)) != declared.default
        ],
        "selection_rule": f"the {'lowest loss' if config.monitor == 'loss' else best} on validation"
        if "validation" in run.result.metrics
        else None,
    }


def _describe_evaluation(run: Run) -> dict[str, Any]:
    evaluated, task, (main, evaluation) = run.evaluated, run.evaluated.task, run.evaluated.main
    metric, measured = next(iter(task.main)), evaluation.finest.values
    levels = {
        SUBSET_NAMES[subset]: {
            units_of(level): metrics for level, metrics in shown_levels(of_subset)
        }
        for subset, of_subset in evaluated.evaluations.items()
    }
    main_levels = levels[SUBSET_NAMES[main]]
    return {
        "subset": SUBSET_NAMES[main],
        "test": evaluated.evaluations.get("test"),
        "leaks": {
            SUBSET_NAMES[subset]: remarks(of_subset)[-1]
            for subset, of_subset in evaluated.evaluations.items()
            if of_subset.in_training
        },
        "mean_of_slides": getattr(run.config, "bag", "") == "slide" and evaluation.patient,
        "only_means": len(task.aggregations) == 1,
        "metric": metric,
        "title": metric_title(metric, task.name),
        "metric_titles": list(
            dict.fromkeys(metric_title(name.partition(":")[0], task.name) for name in measured)
        ),
        "calibration_slope": "calibration_slope" in measured,
        "levels": levels,
        "accuracy": {
            units: metrics
            for units, metrics in main_levels.items()
            if evaluation.finest.intervals  # else without precision
            and {metrics.values.get("sensitivity"), metrics.values.get("specificity")} != {None}
        },
        "recalibrated": {
            units_of(level): [
                (metric_title(name, task.name), before.get(name), after[name])
                for name in ("log_loss", "calibration_error")
                if name in after
            ]
            for subset, level, before, after in list_temperature_effects(evaluated)
            if subset == main
        },
        "failures": _count_failures(main_levels),
        "limitations": list(limitations(run)),
    }


def _count_failures(levels: dict[str, Metrics]) -> dict[str, Any] | None:
    """Return the number of wrong decisions at the highest level whose items have one label each."""
    counts = (
        {
            "wrong": int(np.sum(metrics.confusion) - np.trace(metrics.confusion)),
            "count": metrics.count,
            "units": units,
        }
        for units, metrics in reversed(levels.items())
        if metrics.confusion
    )
    return next(counts, None)


def _describe_breakdown(run: Run) -> dict[str, Any]:
    breakdown, metric = run.result.breakdown, next(iter(run.evaluated.task.main))
    # By the site, and by the columns that the user chose.
    chosen = [
        subgroups
        for subgroups in breakdown.subgroups
        if subgroups.column == "site" or subgroups.column not in AUTOMATIC
    ]
    differences = {
        subgroups.column: {
            group.name: group.differences[metric]
            for group in subgroups.groups
            if metric in group.differences and group.differences[metric].value is not None
        }
        for subgroups in chosen
    }
    return {
        "columns": [column_title(subgroups.column) for subgroups in breakdown.subgroups],
        "subgroups": chosen,
        "differences": {column: groups for column, groups in differences.items() if groups},
        "shortcut": breakdown.shortcut,
    }


def limitations(run: Run) -> Iterator[str]:
    """Yield sentences about what the metrics of a run do not show."""
    if "test" not in run.result.metrics:
        yield f"There is no test set: the metrics are of the validation {run.config.unit}, by which the model was chosen."
    if _describe_split(run)["disjoint"] == "site":
        yield "The test slides are from other sites than the training slides; no other data set was used."
    else:
        yield f"{OTHER_DATA_UNKNOWN}: only one data set was used."
    yield "Variation between splits and seeds is unknown: this is one run."
    for subset, evaluation in run.result.metrics.items():
        for note in (*remarks(evaluation), *evaluation.notes):
            yield f"{SUBSET_NAMES[subset].capitalize()}: {note}."
