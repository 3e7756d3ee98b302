"""Export of trained models; one format per file, each compared with its run."""
