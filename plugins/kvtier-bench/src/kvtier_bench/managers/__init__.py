"""Measurements of kvtier's managers, compared with vLLM's own offloading managers."""
