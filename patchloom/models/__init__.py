"""One family per file: parts → network, with its table of published variants last."""
