"""The console: the page that the gateway serves, its data and its orders."""
