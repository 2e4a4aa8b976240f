"""Reading: rows of many formats, choice of columns, and rows held out for validation."""
