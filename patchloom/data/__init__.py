"""Images, labels and taxonomies → batches. `source.open_data` is the way in."""
