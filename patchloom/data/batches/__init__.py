"""From sets to batches: workers, shared memory, decoded sets, views."""
