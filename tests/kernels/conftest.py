"""Tests of kernels run where Triton is, in its interpreter: `make test-kernels`."""

import os
import threading

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter

    patched = set()
    """Modules whose names Triton has replaced in this launch. It does so for each call, which is most of the time."""

    one_at_a_time = threading.Lock()  # ranks are threads, and Triton puts back what it replaced

    def launch(self, *args, **kwargs):
        with one_at_a_time:
            patched.clear()
            return start(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        module = self.fn.__module__
        if module in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(module)
        return first(self, *args, **kwargs)

    start, interpreter.GridExecutor.__call__ = interpreter.GridExecutor.__call__, launch
    first, interpreter.InterpretedFunction.__call__ = interpreter.InterpretedFunction.__call__, call
