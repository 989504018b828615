"""From slides to a store: decides which slides to do, plans and encodes them in worker processes, records every outcome.

Nothing here knows a command line, and nothing needs TensorFlow.
"""
