"""Ingest slides into a store: plan and encode them in worker processes. The steps are in docs/design/ingestion.md."""
