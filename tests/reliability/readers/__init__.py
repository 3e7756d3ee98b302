"""Everything of patchloom that reads files, each with files to read and an answer that can be compared.

A reader is given a folder of its own, filled from `seeds`, of which one file is then changed. `repair` makes checksums
right again, as a stranger would who made the folder. One file per kind of reader; `table.py` has them all.
"""
