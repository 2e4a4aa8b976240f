"""Rows that are read and tokenized when a step needs them: the index of a file, and the rows at its places."""
