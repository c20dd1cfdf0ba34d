"""What a plan costs before it runs: seconds of lanes, bytes of ranks, links and moves, clocks and energy."""
