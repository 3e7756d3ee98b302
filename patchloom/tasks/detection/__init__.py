"""Object detection: boxes, classes and, where the data has them, masks."""
