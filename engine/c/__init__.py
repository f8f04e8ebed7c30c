"""C sources of the engine that need neither torch nor a model; built when they are first used."""
