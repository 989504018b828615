"""Cohorts: from the tables of archives and the slides on disk to a labels file, with the reason of each exclusion."""
