"""Replay of a recorded trace through an engine's HTTP server."""
