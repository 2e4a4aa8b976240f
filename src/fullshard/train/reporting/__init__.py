"""What a run reports, and where reports go."""
