"""A run's state outside of the ranks' memory: on disk, in object stores, in other machines' memory.

Rooms, in reading order: ``storage`` (safetensors files and stores, written so that a killed process leaves the old or
the new state), ``resilience`` (copies in host memory and on peer machines), ``saving`` (checkpoints, full saves,
exports, torch's distributed format).

A format that was written once is read for ever: add a version, and keep the golden checkpoints of tests/golden loading.
"""
