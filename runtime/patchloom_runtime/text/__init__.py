"""Vocabularies and line-by-line translation, without torch."""
