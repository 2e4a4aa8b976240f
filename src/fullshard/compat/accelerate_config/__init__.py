"""Accelerate's configuration files: read, written and translated."""
