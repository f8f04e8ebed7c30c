"""The commands of training, which `kvrelay` finds where it is installed."""

COMMANDS = {
    "train-hybrid": (f"{__name__}.hybrid", "train_hybrid", "Train a small hybrid model."),
    "draft": (f"{__name__}.draft", "draft", "Train a head that drafts tokens for a model."),
}
