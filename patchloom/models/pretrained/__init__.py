"""Published weights: names, downloads, conversion between layouts."""
