"""Training objectives: called with (model, batch), an objective returns a dict of scalars that contains `loss`."""
