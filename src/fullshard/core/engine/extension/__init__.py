"""Parameters whose class says what is gathered of them, and makes the full parameter of it, as in torch's FSDP2."""
