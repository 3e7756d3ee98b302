"""Pages that stand alone: templates, and what fills them. What they show is gathered elsewhere."""
