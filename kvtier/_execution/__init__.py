"""The loop around the core: its commands are run against the tiers, and their results come back as events."""
