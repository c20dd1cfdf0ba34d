"""Plans for requested shapes: everything that follows from lanes, put together."""
