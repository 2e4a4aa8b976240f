"""Tokenizing: from examples to token ids, which are kept in memory-mapped files."""
