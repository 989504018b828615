"""Ingest on many machines: each Dask worker fills a store on its own disk, a part of the data set.

Only `dask_cluster` and `cluster_ingest` use Dask. What runs on a worker are functions of picklable values.
"""
