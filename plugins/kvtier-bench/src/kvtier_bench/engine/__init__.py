"""Measurements on real engines, started as processes."""
