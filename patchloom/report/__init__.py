"""What people look at: pages, charts and pictures of networks."""
