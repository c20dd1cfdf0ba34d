"""In which order ranks run micro-batches, and what travels between the stages of a lane."""
