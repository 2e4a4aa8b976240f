"""Ranks as threads over torch's threaded test group: a backend that is neither gloo nor NCCL."""

import threading
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg as threaded

if not hasattr(threaded.ThreadLocalWorld, "comms"):
    # torch 2.11: destroy_process_group empties this list, which only the process's own world has.
    threaded.ThreadLocalWorld.comms = property(lambda self: [])


@contextmanager
def worlds():
    """Give every thread a ``torch.distributed`` of its own, and restore the process's at the end."""
    threaded.ProcessLocalGroup.reset()
    threaded._install_threaded_pg()
    _set_thread_isolation_mode(True)  # groups of one name in several threads
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()


def run_threaded(size, work):
    """Run ``work(rank)`` on ``size`` threads, each a rank of the default process group; results in rank order."""
    results, failures, store = [None] * size, [], dist.HashStore()

    def rank_main(rank):
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            results[rank] = work(rank)
        except BaseException as error:
            failures.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)  # the others leave their collective by SystemExit
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with worlds():
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, SystemExit)), failures[0])
    return results
