"""Checkpoints on disk: the state that training changes, in the format of `torch.distributed.checkpoint`.

    CHECKPOINTS/step-50/            after 50 committed steps
        __0_0.distcp, __1_0.distcp  what each rank owned
        .metadata                   which box of which tensor lies where (DCP's own index)
        checkpoint.json             step, configuration, tensors, and the SHA-256 of every file: the manifest

Tensors are logical ones: `model/NAME` and `optimizer/K/NAME` (K-th state tensor) in fp32, `buffer/NAME` for buffers
that training changes. A parameter is stored **flat**: a DCP tensor of one axis with as many elements as the parameter,
in row-major order, its shape in the manifest. Ranks own 1-D boxes of flat buckets, which are seldom boxes of the
parameter's own shape. Flat, any layout converts to any other by intersecting intervals.

No process group is needed: what every rank writes follows from the plan. A checkpoint is written to `step-N.partial`
and renamed when all of it is on disk, so every `step-N` is complete.
"""
