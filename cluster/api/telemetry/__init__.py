"""Metrics under names that others have chosen, and the label values that are known beforehand."""
