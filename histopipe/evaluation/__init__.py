"""How good predictions are: of patches, slides and patients, with intervals. Arrays in, frozen values out; no model is needed."""
