"""The parts that run once, when a model is sharded."""
