"""Coding agents as their makers publish them, against a server whose model says what a script
tells it: real router, workers, formats and API."""
