"""The coordinator process: sockets, store, plans and clock around the pure coordinator of `control.protocol`."""
