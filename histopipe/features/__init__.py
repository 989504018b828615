"""Features of patches on disk: one HDF5 file a slide, and the bags that multiple-instance learning makes of them."""
