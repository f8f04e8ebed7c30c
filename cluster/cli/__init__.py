"""The command line asks a cluster, and starts it."""
