"""Start and end of workers, and their communication with the launcher."""
