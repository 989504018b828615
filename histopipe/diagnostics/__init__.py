"""Checks of the machine and the installation. Each is measured or tried, not looked up."""
