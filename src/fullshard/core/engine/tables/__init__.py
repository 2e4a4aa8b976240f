"""Tables that stay home: each rank keeps its rows of an embedding or head, and tokens travel to them."""
