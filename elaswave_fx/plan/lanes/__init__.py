"""Lanes from ranks: cuts of the units, and samples of each lane."""
