"""Refusal of optimizers whose results on shards would differ from unsharded training.

``guard`` decides, ``trial`` tries an unknown class on a small matrix, ``claims`` records which rank steps what.
Importing ``guard.guard`` registers hooks around every optimizer's step.
"""
