"""How long passes and transfers take on hardware that is not here."""
