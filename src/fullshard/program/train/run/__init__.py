"""A run: assembly, training loop, steps, checkpoints and summary."""
