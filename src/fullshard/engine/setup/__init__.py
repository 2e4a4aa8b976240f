"""What runs once, when a model is sharded."""
