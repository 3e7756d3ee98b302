"""Images with masks or boxes: which layout a folder has, and one reader per format."""
