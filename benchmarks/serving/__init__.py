"""Of whole servers under load, beside peers."""
