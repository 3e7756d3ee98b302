"""Sentence pairs → subwords → batches."""
