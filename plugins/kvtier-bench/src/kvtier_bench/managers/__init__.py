"""Measurements of TieringManager beside vLLM's own managers of offloading."""
