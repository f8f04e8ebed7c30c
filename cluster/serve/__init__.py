"""`kvrelay serve`: router, controller and API in one process; further router processes."""
