"""Embeddings that place similar images close together: DINO, Grafit and their baselines."""
