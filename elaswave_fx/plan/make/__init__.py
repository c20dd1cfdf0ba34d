"""Plans for wanted shapes: everything that follows from lanes, put together."""
