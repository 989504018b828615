"""Plan the patches of a slide. Pure functions compute the plan from a spec, a slide's header and its thumbnail."""
