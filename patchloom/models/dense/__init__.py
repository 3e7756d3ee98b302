"""Networks with an output per position: feature pyramids, segmentation and detection heads."""
