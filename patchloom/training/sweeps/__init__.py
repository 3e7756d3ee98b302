"""Grids of settings (`patchloom sweep`) and cross-validation (`train --folds`): each point is an ordinary run."""
