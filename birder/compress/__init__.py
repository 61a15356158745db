"""What turns a float message into few bits. Never communicates."""
