"""Refuses optimizers that would step shards differently from unsharded parameters."""
