"""Ingest: plan and encode slides in worker processes, and record every outcome. The steps are in docs/architecture.md."""
