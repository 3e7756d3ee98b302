"""The parts every network is put together from, one idea a file."""
