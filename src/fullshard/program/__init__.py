"""The program: ``fullshard train run.yaml`` and its other verbs, over the library.

Rooms, in reading order: ``config`` (a run file's options), ``data`` (tables to batches), ``metrics`` (how texts are
scored), ``models`` (building, adapters, losses), ``train`` (setup, the loop, evaluation, plans of run files),
``launch`` (ranks as processes), ``sharing`` (uploads), ``report`` (pages), ``starter`` (``init``), ``cli`` (one file
for each verb).

A new option is a field in ``config`` that says all about itself; a new metric is an entry in ``metrics``; a new verb is
one file in ``cli``. Nothing here may change what the library computes: that is the core's.
"""
