"""The console: a page that the gateway serves, and what it shows and does."""
