"""One family a file: parts → network, with its table of published variants last."""
