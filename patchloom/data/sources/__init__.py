"""Where data come from: one file per form, found by `source.find_source`."""
