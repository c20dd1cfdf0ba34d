"""The independent checker of plans and instruction lists. It shares types with the planner, but no code."""
