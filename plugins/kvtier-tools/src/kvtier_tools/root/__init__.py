"""Commands for a file tier's root, even while engines use it: list, measure, verify, compare, delete."""
