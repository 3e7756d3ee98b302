"""Numbers: an evaluation yields (name, value) pairs, with names that stay."""
