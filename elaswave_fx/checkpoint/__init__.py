"""Checkpoints on disk: the state that training changes, in the format of `torch.distributed.checkpoint`.

    CHECKPOINTS/step-50/            after 50 committed steps
        __0_0.distcp, __1_0.distcp  what each rank owned
        .metadata                   which box of which tensor lies where (DCP's own index)
        checkpoint.json             step, configuration, tensors, and the SHA-256 of every file: the manifest

Tensors are logical ones: `model/NAME` and `optimizer/K/NAME` (K-th state tensor) in fp32, `buffer/NAME` for buffers
that training changes. A parameter is stored **flat**: a DCP tensor of one axis with as many elements as the parameter,
in row-major order, its shape in the manifest. Ranks own 1-D boxes of flat buckets, which seldom are boxes of the
parameter's own shape; flat, any layout can be cut again into any other by the intersection of intervals.

No process group is needed: what every rank writes follows from the plan. A checkpoint grows in `step-N.partial` and is
renamed when everything in it is on disk, so what is named `step-N` is whole.
"""
