"""Image classification: one class per image."""
