"""Metrics, explanations and KV events for operators and routers, and the time of the engine's steps."""
