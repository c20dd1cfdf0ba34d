"""The user's view of a run: progress, metrics, events and the files of the run directory."""
