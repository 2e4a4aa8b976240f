"""Tables that stay home: each rank keeps its rows of an embedding or head; ranks exchange those they look up."""
