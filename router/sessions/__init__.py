"""Sessions: conversations whose KV outlives their requests."""
