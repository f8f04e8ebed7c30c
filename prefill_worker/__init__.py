"""Policy of prefill workers: what they do with a request; the worker itself is `kvrelay.worker`."""
