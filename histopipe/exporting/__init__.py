"""Export stores to the formats of other tools: tables of patches, and the patches themselves."""
