"""`patchloom train`: plan a run, put it together, do it, report it."""
