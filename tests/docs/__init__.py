"""Tests of the documents: what they name exists, and what the guides tell works."""
