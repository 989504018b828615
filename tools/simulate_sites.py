"""Compare folds by patient and by site on cohorts like TCGA's, with a signature of each site in the features.

python tools/simulate_sites.py [--cohorts 20] [--folds 5]

Cohorts have 500 patients of 25 sites, whose sizes and shares of three classes differ. The first table has the largest
deviation of a class, and of all patches, from the share of a fold: of folds by site with exchanges of single sites, as
before version 0.4, and with the integer programme. The second has the mean AUC of a logistic regression of features that
contain the site, and nothing of the class, or a little of it.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from simulate_splits import Cohort, Group
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from histopipe.splits import assignment
from histopipe.splits.splits import Splits
from histopipe.splits.splitting import make_folds
from histopipe.tasks.choices import SplitBy

SITES, PATIENTS, CLASSES, FEATURES = 25, 500, 3, 32


def site_cohort(
    seed: int, *, sites: int = SITES, patients: int = PATIENTS, classes: int = CLASSES
) -> Cohort:
    """Return a cohort whose sites have different sizes and different shares of the classes."""
    rng = np.random.default_rng(seed)
    sizes = rng.dirichlet(np.full(sites, 1.5))
    shares = rng.dirichlet(np.full(classes, 2.0), size=sites)
    groups = []
    for patient in range(patients):
        # Each site has a patient of each class too, so that no class is in too few sites.
        site = patient % sites if patient < 2 * sites else int(rng.choice(sites, p=sizes))
        label = f"class {rng.choice(classes, p=shares[site])}"
        for slide in range(1 + (rng.random() < 0.1)):
            count = 1 + int(rng.lognormal(5, 1))
            groups.append(Group(f"P{patient}-{slide}", label, f"P{patient}", count, f"site {site}"))
    return Cohort(groups)


def deviations(folds: Sequence[Splits]) -> tuple[float, float]:
    """Return the largest deviations of a class, in slides, and of all patches, from the share of a fold."""
    slides = folds[0].slides
    fold_of = {s.id: n for n, split in enumerate(folds) for s in split.slides_on("test")}
    number = np.array([fold_of[slide.id] for slide in slides])
    labels, counts = np.array([s.label for s in slides]), np.array([s.count for s in slides])

    def largest(members: NDArray[np.bool_], weights: NDArray[np.int64]) -> float:
        shares = np.bincount(number[members], weights[members], minlength=len(folds))
        return float(np.abs(shares / shares.sum() - 1 / len(folds)).max())

    ones = np.ones(len(slides), np.int64)
    of_classes = max(largest(labels == name, ones) for name in set(labels.tolist()))
    return of_classes, largest(counts > 0, counts)


def features_of(
    splits: Splits, seed: int, signature: float, signal: float
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return features (N, D) with a signature of each site and a signal of each class, and the classes (N,)."""
    rng = np.random.default_rng(seed)
    sites = defaultdict[str, NDArray[np.float64]](lambda: rng.normal(size=FEATURES))
    directions = rng.normal(size=(len(splits.classes), FEATURES))
    labels = np.array([splits.classes.index(slide.label) for slide in splits.slides])
    of_sites = np.array([sites[str(slide.site)] for slide in splits.slides])
    noise = rng.normal(size=(len(labels), FEATURES))
    return signature * of_sites + signal * directions[labels] + noise, labels


def mean_auc(folds: Sequence[Splits], seed: int, signature: float, signal: float) -> float:
    """Return the mean over the folds of the macro one-vs-rest AUC."""
    features, labels = features_of(folds[0], seed, signature, signal)
    aucs = []
    for split in folds:
        side = np.array([slide.subsets[0] for slide in split.slides])
        model = LogisticRegression(max_iter=2000).fit(features[side != 2], labels[side != 2])
        scores = model.predict_proba(features[side == 2])
        if len(set(labels[side == 2].tolist())) == len(split.classes):
            aucs.append(roc_auc_score(labels[side == 2], scores, multi_class="ovr"))
    return float(np.mean(aucs))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cohorts", type=int, default=20)
    parser.add_argument("--folds", type=int, default=5)
    options = parser.parse_args()
    measured = defaultdict[str, list[tuple[float, ...]]](list)
    aucs = defaultdict[tuple[float, float, SplitBy], list[float]](list)
    programme = assignment.optimal_parts
    for seed in range(options.cohorts):
        cohort = site_cohort(seed)
        for name, method in (("exchanges", lambda *_: None), ("integer programme", programme)):
            assignment.optimal_parts = method
            began = time.perf_counter()
            by_site = make_folds([cohort], options.folds, split_by="site", seed=seed)
            measured[name].append((*deviations(by_site), time.perf_counter() - began))
        by_patient = make_folds([cohort], options.folds, split_by="patient", seed=seed)
        for signature, signal in ((0.0, 0.0), (1.0, 0.0), (0.0, 0.3), (1.0, 0.3)):
            for by, folds in (("patient", by_patient), ("site", by_site)):
                auc = mean_auc(folds, seed, signature, signal)
                aucs[signature, signal, by].append(auc)  # type: ignore[index]
    print(f"{options.cohorts} cohorts, {options.folds} folds by site")
    print("| method | deviation of a class | of all patches | seconds |\n| --- | --- | --- | --- |")
    for name, rows in measured.items():
        of_class, of_patches, seconds = np.median(rows, axis=0)
        worst = np.max(rows, axis=0)
        print(
            f"| {name} | {of_class:.1%} (at most {worst[0]:.1%}) | {of_patches:.1%} | {seconds:.1f} |"
        )
    print("\n| signature | signal | AUC by patient | AUC by site |\n| --- | --- | --- | --- |")
    for signature, signal in dict.fromkeys((key[0], key[1]) for key in aucs):
        cells = [
            f"{np.mean(values):.3f} ± {np.std(values):.3f}"
            for values in (aucs[signature, signal, "patient"], aucs[signature, signal, "site"])
        ]
        print(f"| {signature:g} | {signal:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
