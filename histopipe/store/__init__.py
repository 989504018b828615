"""The on-disk format: one LMDB environment of encoded patches, slide records and columnar indexes.

Only this package imports lmdb. `docs/store-format.md` is the format's manual.
"""
