"""Tables that stay home: an embedding's or head's rows stay with their ranks, and tokens travel to them."""
