"""What runs in every training step: gather, forward, backward, reduce."""
