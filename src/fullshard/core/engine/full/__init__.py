"""Full parameters of a sharded model: showing, streaming, loading and listing them."""
