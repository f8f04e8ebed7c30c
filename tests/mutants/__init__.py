"""Mutants: changes of one operator, constant or statement, each of which a test should notice."""
