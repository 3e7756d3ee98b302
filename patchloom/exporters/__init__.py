"""Export of trained models: one file per format, and the comparison of each exported file with its run."""
