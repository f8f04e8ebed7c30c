"""The autoscaler on real workers, under load that comes and goes."""
