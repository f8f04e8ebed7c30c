"""Who serves a request: workers as a router sees them, costs in seconds, the choice."""
