"""The processes of a cluster: who starts which, what they say to each other, and Ray."""
