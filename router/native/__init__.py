"""C sources of the prefix index. `router.index_table` has them compiled, and calls them."""
