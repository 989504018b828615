"""The store on disk: one LMDB environment of encoded patches, slide records and columnar indexes.

Only this package imports lmdb. `docs/reference/store-format.md` describes the format.
"""
