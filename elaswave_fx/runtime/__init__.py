"""One worker: its engine, state, optimizer and device."""
