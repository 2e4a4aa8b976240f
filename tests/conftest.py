"""What holds for all tests."""

import gc

import pytest


def pytest_collection_finish():
    """Free what collecting the tests left in cycles, before it is frozen below."""
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_this_files_objects_only():
    """A collection among all that other files imported and kept takes a second, and some tests make dozens."""
    gc.collect()
    gc.freeze()
