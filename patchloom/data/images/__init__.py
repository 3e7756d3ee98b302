"""Stores and batches of images, and frames of videos."""
