"""What is done in the background: counting, eviction, sweeping, setting times, the quarantine."""
