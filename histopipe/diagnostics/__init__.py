"""Checks of the machine and the installation, by measurement or test."""
