"""The parts of networks, one idea per file."""
