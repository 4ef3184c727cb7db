"""Basics of all settings: sizes, durations and their bounds, and one form of message for wrong values."""
