"""Semantic segmentation: one class per pixel."""
