"""What operators work with: metrics, dashboards, alerts, and how the system is launched."""
