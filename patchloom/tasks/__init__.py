"""What is learned: one file per task, with all that is its own from the data to the report."""
