"""elaswave_fx: training large models on clusters that change while training.

A model is captured once as a torch.fx graph, compiler passes decide how it runs, a native runtime executes it.
"""

import os

# `import torch` loads every installed extension for other devices, such as torch_npu, and fails if one lacks its
# vendor's libraries. Here a device imports the extension that it needs. A value that the user has set is kept.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Large tensors use 2 MiB pages where the system grants them. The kernel fills such memory faster and frees it ten times
# as fast; survivors wait for a killed rank's memory to be freed.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.1.0"
