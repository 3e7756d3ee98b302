"""What is learned: one folder per task, with all that is its own from the data to the report."""
