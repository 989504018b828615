"""Ingesting on many machines: slides are tasks, and each worker fills a store of its own.

Only `connect` and `driver` know of Dask; what runs on a worker is plain functions of picklable values.
"""
