"""The simulator: production nodes under virtual time, with faults chosen by a seed."""
