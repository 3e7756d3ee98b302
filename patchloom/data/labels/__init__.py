"""Class labels from tables, file names and nested folders, and levels of coarser classes."""
