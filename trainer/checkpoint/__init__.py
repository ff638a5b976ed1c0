"""Checkpoints: complete and verified or not there, written beside training, read back on any topology.

    manifest.py  what makes a checkpoint complete: a list of its files with sizes and checksums, written last
    catalog.py   which checkpoints a directory holds, which of them is resumed from, and which are kept
    table.py     what ``lockstep checkpoint`` tells of them
    anchor.py    whether the directory is still the one that the run began with
    shared.py    whether all processes see the same directory
    reading.py   a checkpoint's arrays on the mesh of now, or why they do not fit
    store.py     saving beside training with orbax, and the door to all of the above

The first four need no JAX, so that ``lockstep checkpoint list`` starts at once.
"""
