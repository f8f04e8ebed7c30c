"""Replays in which workers come and go: by the production autoscaler, or by who knows the trace."""
