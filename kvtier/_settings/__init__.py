"""What all settings share: sizes, durations and their bounds, and one kind of message for wrong values."""
