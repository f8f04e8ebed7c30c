"""Connections of clients, below the application."""
