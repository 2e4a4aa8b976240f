"""T5's attention in one kernel: scores, trained bias, masks, dropout and softmax, and nothing of their size in memory.

Files: ``kernels`` (Triton), ``launch`` (starts them), ``operator`` (torch's operator), ``way`` (``speed.ways``).
"""
