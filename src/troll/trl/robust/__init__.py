"""What keeps a long run alive: complete checkpoints, exact resume, guards, out-of-memory retries."""
