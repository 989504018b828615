"""What a store holds, for other tools: a table of its patches, and the patches themselves."""
