"""``build_lmdb``: plan, processes, executors, resume, publication."""
