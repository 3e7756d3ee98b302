"""Pictures of networks and of what they do with images."""
