"""AdamW with moments in 8 bits or bfloat16."""
