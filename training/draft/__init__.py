"""A one-layer draft head, trained on its model's own answers: `kvrelay draft`."""
