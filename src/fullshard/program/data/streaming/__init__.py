"""Streaming: rows are indexed once, then read and tokenized when a step needs them."""
