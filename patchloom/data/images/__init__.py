"""Batches of images, faults of masks and boxes, frames of videos."""
