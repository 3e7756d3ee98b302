"""`python -m patchloom.cli`, the same as `patchloom`."""

from patchloom.cli import main

main()
