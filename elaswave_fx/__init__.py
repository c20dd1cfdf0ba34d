"""elaswave_fx: training large models on clusters that change while training.

A model is captured once as a torch.fx graph, compiler passes decide how it runs, a native runtime executes it.
"""

import os

# `import torch` loads every installed extension for other devices, such as torch_npu, and fails where one lacks its
# vendor's libraries. Here a device that needs an extension imports it. Users who set the variable have the last word.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Large tensors in pages of 2 MiB, where the system grants them: the kernel fills such memory faster and, what survivors
# of a killed rank wait for, takes it apart ten times as fast.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.1.0"
