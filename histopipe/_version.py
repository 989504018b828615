"""The version, apart so that it can be read without loading anything."""

__version__ = "0.2.0"
