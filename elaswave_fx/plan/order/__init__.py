"""Orders of micro-batches on ranks, and transfers between the stages of a lane."""
