"""File trees: folders and archives behind one interface."""
