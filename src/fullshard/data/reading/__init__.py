"""From files and datasets to examples: tables of many formats, the choice of columns, rows held out."""
