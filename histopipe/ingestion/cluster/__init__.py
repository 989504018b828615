"""Ingest on several machines: each Dask worker fills one part of the data set, a store on its local disk."""
