"""What a prefill worker does with a request; the worker itself is `kvrelay.worker`."""
