"""The tiles of a slide file: where they are, what they contain, how they compare with OpenSlide."""
