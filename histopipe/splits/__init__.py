"""The slides of a run: labels, targets, patients and covariates, their subsets or the reasons of their exclusion."""
