"""Commands over a file tier's root, offline or beside engines: list, measure, verify, compare, delete."""
