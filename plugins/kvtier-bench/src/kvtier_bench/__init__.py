"""Benchmarks and the demo of kvtier: the commands ``kvtier bench`` and ``kvtier demo``."""
