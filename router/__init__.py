"""The router: sends each request to the workers that answer it soonest, and owns its tokens."""
