"""Running a model on a device: a library without bus, HTTP or environment."""
