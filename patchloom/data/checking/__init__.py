"""Every picture looked at once: what is wrong with data, before training finds it."""
