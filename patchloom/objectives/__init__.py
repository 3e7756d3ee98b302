"""What is minimised: called with (model, batch), an objective returns a dict of scalars with `loss`."""
