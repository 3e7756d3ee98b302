"""Vocabularies and text cleaning without torch."""
