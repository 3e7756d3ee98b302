"""Objects in buckets: the process that talks to the servers, a cache, and files that are read like local ones."""
