"""What holds for all tests."""

import gc


def pytest_collection_finish():
    """Leave what is imported by now out of collections: one of a process that has all tests takes nearly a second."""
    gc.collect()
    gc.freeze()
