"""Scan of all images of a dataset, and reports of what is wrong with them."""
