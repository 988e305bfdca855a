"""The LMDB dataset: format, writer, reader, gathering, verification.

LMDB is the file format here: its transactions write the files, and its tools and other readers open them. Our own
reader maps the files and finds each record by its offset in a table beside it.
"""
