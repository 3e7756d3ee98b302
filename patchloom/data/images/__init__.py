"""Batches of images, and frames of videos."""
