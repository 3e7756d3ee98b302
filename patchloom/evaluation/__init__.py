"""Evaluation metrics. Every evaluation yields (name, value) pairs with stable names."""
