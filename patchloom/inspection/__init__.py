"""Looking at networks: what they cost, what they do."""
