"""C sources of the prefix index and of routing decisions, compiled when they are first used."""
