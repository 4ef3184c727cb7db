"""The commands for operators of kvtier: checks, sizes, metrics, hints, and the root of a file tier."""
