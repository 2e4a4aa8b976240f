"""Parameters that tensor parallelism has divided already: the engine shards each rank's block further."""
