"""A classifier as one HTML page that runs it in the browser: program, weights, kernels, interpreter, page."""
