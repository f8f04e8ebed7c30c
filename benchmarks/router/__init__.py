"""Of routers: decisions, several of them, restarts."""
