"""Work and state to assign: units and their costs, ranks and their memory, boxes of state, tiles."""
