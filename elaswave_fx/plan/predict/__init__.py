"""Predicted cost of a plan: seconds of lanes, bytes of ranks, links and moves, clocks and energy."""
