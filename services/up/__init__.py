"""All of Baton on one machine."""
