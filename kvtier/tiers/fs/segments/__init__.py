"""The format ``segments``: many chunks in one large file, for chunks that are too small for a file each."""
