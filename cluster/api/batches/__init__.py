"""Files, and batches of requests that run when the cluster has time."""
