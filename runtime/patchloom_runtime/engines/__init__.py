"""Graph formats and the engines that run them."""
