"""`patchloom sweep`: a grid of settings over one or more datasets, each point an ordinary run."""
