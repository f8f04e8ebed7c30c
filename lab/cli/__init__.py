"""The commands of the laboratory, which `kvrelay` finds where it is installed."""

COMMANDS = {
    "bench": (f"{__name__}.bench", "bench", "Measure a server, or the engine alone."),
    "profile": (f"{__name__}.profile", "profile", "Measure this machine into a timing file."),
    "replay": (f"{__name__}.replay", "replay_command", "What would a cluster do with this load?"),
    "fuzz": (f"{__name__}.fuzz", "fuzz", "Run the cluster's nodes in the simulator."),
}
