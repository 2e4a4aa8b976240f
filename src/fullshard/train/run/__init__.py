"""A run: its parts, the training loop, one step, checkpoints and the summary."""
