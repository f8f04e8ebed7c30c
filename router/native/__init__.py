"""C sources of the prefix index. `router.index.table` has them compiled, and calls them."""
