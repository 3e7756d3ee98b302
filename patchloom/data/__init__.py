"""Images, labels and text as batches. `sources.source.open_data` is the entry point."""
