"""Export stores to the formats of other tools: tables of patches, and patch images."""
