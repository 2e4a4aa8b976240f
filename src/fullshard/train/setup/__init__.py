"""What a run needs before its first step: data, model, optimizer, schedule."""
