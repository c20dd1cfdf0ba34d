"""How workers start, what they and the launcher say to each other, and how they end."""
