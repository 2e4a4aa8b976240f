"""A run's state outside of the ranks' memory: on disk, in object stores, in memory that outlives a rank.

Rooms, in reading order: ``storage`` (safetensors files and stores, written so that a killed process leaves the old or
the new state), ``saving`` (checkpoints on disk and in memory, full saves, exports, torch's distributed format).

A format that was written once is read for ever: add a version, and keep the golden checkpoints of tests/golden loading.
"""
