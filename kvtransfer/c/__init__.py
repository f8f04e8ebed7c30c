"""C sources of the transfer of KV; built when they are first used."""
