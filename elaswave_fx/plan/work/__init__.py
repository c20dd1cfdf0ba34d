"""What there is to share out: units and their costs, ranks and their memory, boxes of state, tiles."""
