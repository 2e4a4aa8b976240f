"""Preparation of a run before its first step: data, model, optimizer, schedule, checkpoint to resume from."""
