"""The console: a page for operators that shows the cluster as it is, and what feeds it."""
