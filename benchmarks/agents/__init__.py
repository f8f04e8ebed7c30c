"""Sessions of real coding agents, scaled to the machine, through real servers."""
