"""`patchloom sweep`: a grid of settings over one or more data sets, each point an ordinary run."""
