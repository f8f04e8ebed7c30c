"""The command line of a cluster."""
