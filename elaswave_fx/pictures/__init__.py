"""Pictures of a run, drawn from what it has left: its recoveries, and its plans before and after them."""
