"""One module for each kind of device: its streams, events and pinned memory."""
