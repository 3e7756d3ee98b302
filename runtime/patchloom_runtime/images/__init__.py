"""Decoding and preprocessing of images without torch."""
