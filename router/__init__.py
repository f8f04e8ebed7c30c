"""The router: sends each request to the workers that will answer it soonest, and owns its tokens."""
