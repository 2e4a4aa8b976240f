"""From token ids to batches: the plan of an epoch, collation, packing."""
