"""Training: heads that draft tokens for a model, and small hybrid models for tests and trials.

draft       `kvrelay draft`: a head, from the model's own answers
hybrid, corpus  `kvrelay train-hybrid`: five million parameters, and the words for it
cli         the commands
"""
