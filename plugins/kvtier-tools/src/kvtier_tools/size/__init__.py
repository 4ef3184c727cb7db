"""Computes the sizes of a model's KV cache on a machine: the command ``kvtier size``."""
