"""Trained models behind HTTP: one front process that talks to clients, and one or more that hold the model."""
