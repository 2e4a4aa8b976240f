"""What holds for all tests."""

import gc

import pytest

from support.processes import give_children_default_signals


def pytest_collection_finish():
    """Free what collecting the tests left in cycles, before it is frozen below."""
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal():
    """Tests send signals to processes; how this one was started must not decide whether they hear them.

    A fixture, so that of pytest-xdist it runs in the processes that run tests, not in the one that starts them.
    """
    give_children_default_signals()


@pytest.fixture(scope="module", autouse=True)
def collections_look_at_this_files_objects_only():
    """A collection among all that other files imported and kept takes a second, and some tests make dozens."""
    gc.collect()
    gc.freeze()
