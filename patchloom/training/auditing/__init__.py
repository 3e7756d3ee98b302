"""`patchloom audit`: likely wrong labels, conflicts, leaks and outliers of a dataset, and a page to correct them."""
