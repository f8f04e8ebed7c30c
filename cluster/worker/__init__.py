"""A worker put together: its model, its KV memory, its threads and its process."""
