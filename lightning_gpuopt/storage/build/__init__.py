"""``build_lmdb``: plan, processes, resume, publication."""
