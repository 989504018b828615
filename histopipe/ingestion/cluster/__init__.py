"""Ingest on many machines: each Dask worker fills a part of the data set, a store on its own disk."""
