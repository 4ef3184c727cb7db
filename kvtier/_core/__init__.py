"""The rules of tiering: pure, synchronous, without clock, I/O or arrays. See ``tiering.Tiering``."""
