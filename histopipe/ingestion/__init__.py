"""Ingest: decide which slides to ingest, plan and encode them in worker processes, and record every outcome.

One slide, from the command to the committed patches, in the order of the calls:

1. `ingest.ingest` reads its arguments by `request.read_request`.
2. `ingest_slides.ingest_slides` opens the store; `decisions.sort_slides` decides which slides are ingested.
3. `pipeline.Pipeline.run` submits tasks to workers and passes their results to a `SlideInFlight`.
4. In a worker, `planning.plan_slide` chooses level, patches, route and labels.
5. In workers, `storing.store_chunk` takes patches from a `PatchSource` and writes them by `StoreWriter.put_patches`.
6. `Pipeline` writes the record and the index by `StoreWriter.complete`; by this the slide becomes visible.
"""
