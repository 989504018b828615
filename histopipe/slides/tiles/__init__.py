"""Native tiles of slide files: locate them, read them, and compare them with OpenSlide."""
