"""One picture: decoded, with its mask and boxes, cropped as a network is shown it."""
