"""A seeded cluster: clock, links, pauses, crashes and a store under the real membership and commit code."""
