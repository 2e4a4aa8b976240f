"""From examples to token ids, kept in memory-mapped files."""
