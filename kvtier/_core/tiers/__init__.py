"""What the core knows of each secondary tier: its health, and what may be put into it and got from it now."""
