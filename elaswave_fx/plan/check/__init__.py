"""The independent checker of plans and of instruction lists; it shares types with the others, and no code."""
