"""Tools for people, one folder a command, and the make targets' scripts."""
