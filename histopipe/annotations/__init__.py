"""Outlines that people drew on slides: read from their tools' files, and laid over patches."""
