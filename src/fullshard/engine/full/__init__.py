"""Full parameters of a sharded model: shown, streamed, loaded and listed."""
