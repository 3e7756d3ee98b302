"""From datasets to batches: sampling, workers, shared memory, decoded datasets, views."""
