"""What a decode worker does with a request; the worker itself is `kvrelay.worker`."""
