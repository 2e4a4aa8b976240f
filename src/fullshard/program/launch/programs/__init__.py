"""Programs that the ranks of ``fullshard train``, ``evaluate`` and ``predict`` run."""
