"""From a checkpoint's files to a model's configuration and weights."""
