"""Who computes what: pure decisions over plain values, nothing here imports torch.

In: a `Workload` (costs, values, buckets of the units) and a `Topology` (alive ranks). Out: a `Plan`, checked by
`check_plan`, and per rank the instruction lists of `step_program` and `eval_program`.
"""
