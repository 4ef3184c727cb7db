"""Chunks as files: the native library's calls and I/O threads, and the index of known chunks."""
