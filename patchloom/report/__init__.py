"""Pages, charts and pictures of networks."""
