"""`kvrelay`: the commands of a cluster, and those of the laboratory beside them."""

from __future__ import annotations

from kvrelay.cluster.cli.main import main

main.commands_at |= {
    "bench": ("kvrelay.lab.cli.bench", "bench", "Measure a server, or the engine alone."),
    "profile": ("kvrelay.lab.cli.profile", "profile", "Measure this machine into a timing file."),
    "replay": (
        "kvrelay.lab.cli.replay",
        "replay_command",
        "What would a cluster do with this traffic?",
    ),
    "fuzz": ("kvrelay.lab.cli.fuzz", "fuzz", "Run the cluster's nodes in the simulator."),
}
main.renamed = {"simulate": "replay", "sim": "fuzz"}

if __name__ == "__main__":
    main()
