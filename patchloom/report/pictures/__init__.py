"""Pictures of networks and of their predictions on images."""
