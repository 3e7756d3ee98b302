"""One HTML page that runs a classifier without a server."""
