"""Trained image models: predictions, evaluations, embeddings, indexes and search."""
