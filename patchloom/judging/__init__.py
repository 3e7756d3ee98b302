"""Trained models measured and shown: several runs, levels, seeds, text, comparisons."""
