"""Measuring this machine into a timing file: passes of the real engine, links between real agents,
what workers that share cores cost each other, and what a served request takes beside its pass."""
