"""Who may come in, who goes next, and when a refused client should come back."""
