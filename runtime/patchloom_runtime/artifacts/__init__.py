"""Exported models: metadata, and predictors for each task."""
