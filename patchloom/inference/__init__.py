"""Trained image models in use: predictions, embeddings, index and search."""
