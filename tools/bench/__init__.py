"""Benchmarks: peer and own side by side in one run, ratios with medians. `python -m tools.bench NAME`."""
