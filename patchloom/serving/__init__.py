"""A trained model behind HTTP: one process that talks to clients, and one or more that hold the model."""
