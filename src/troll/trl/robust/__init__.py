"""Long runs: complete checkpoints, exact resume, guards, out-of-memory retries. ``trainer`` lists what is where."""
