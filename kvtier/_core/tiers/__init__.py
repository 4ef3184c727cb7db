"""The core's view of each secondary tier: its health, and whether it takes puts and gets now."""
