"""Cohorts: from the tables that archives publish, and the slides on disk, to a labels file with the reason of each exclusion."""
