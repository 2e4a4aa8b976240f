"""The parts that run in every training step: gather, forward, backward, reduce."""
