"""Work assignment as pure decisions over plain values; nothing here imports torch.

In: a `Workload` (costs, values, buckets of the units) and a `Topology` (alive ranks). Out: a `Plan`, checked by
`check_plan`, and per rank the instruction lists of `step_program` and `eval_program`. Each package imports only earlier
ones:

    work      units and their costs, ranks, boxes, tiles        replicas   owners and replica holders of boxes
    order     micro-batches on ranks, transfers                 make       plans for requested shapes
    plan.py   the Plan                                          next       plans after failures, joins, reshapes
    predict   seconds, bytes, energy                            lower      instruction lists, engine specs
    lanes     cuts of units, shares of samples                  check      the independent checker
"""
