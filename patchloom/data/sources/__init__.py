"""Sources of labeled images, one format per file. `source.find_source` is the entry point."""
