"""Replaying traffic against a cluster that does not exist yet: the production nodes under virtual
time, with the model's passes and the transfers replaced by how long they take."""
