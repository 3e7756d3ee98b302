"""Inference engines: each checks and opens graphs of one format, as callables from numpy arrays to numpy arrays."""
