"""Chunks as files: the native library's calls on them, its I/O threads, and the index of keys."""
