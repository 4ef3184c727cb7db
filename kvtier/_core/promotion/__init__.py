"""Promotion: which chunks are fetched from which tier, for whom, and what is held for requests that wait."""
