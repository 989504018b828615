"""Which cells of a slide become patches: pure functions from a spec, a slide's header and its thumbnail to a plan."""
