"""LMDB storage: one directory of sharded LMDB files, read by offset and never by chance."""
