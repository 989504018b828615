"""The version, apart so that it can be read without loading anything."""

__version__ = "0.3.0.dev0"
