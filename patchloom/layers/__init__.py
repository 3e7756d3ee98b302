"""The parts every network is put together from, one idea per file."""
