"""Labels of patches by people: journals, agreement of raters, and a classifier that learns from them."""
