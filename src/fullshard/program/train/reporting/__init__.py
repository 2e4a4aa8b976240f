"""Reports of a run, and the sinks that receive them."""
