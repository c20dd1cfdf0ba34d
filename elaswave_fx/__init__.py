"""elaswave_fx: training large models on clusters that change while training.

A model is captured once as a torch.fx graph, compiler passes decide how it runs, a native runtime executes it.
"""

__version__ = "0.1.0"
